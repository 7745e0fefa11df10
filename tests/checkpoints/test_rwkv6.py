"""RWKV-6, which transformers has not, against the authors' formulas token by token."""

import pytest
import torch
from torch.nn import functional as F

import longitude as lg
from tests.checkpoints.copied import renamed
from tests.checkpoints.recurrent_models import VOCABULARY, in_steps, logits, perturb, some_ids
from tests.support import close


@pytest.fixture
def ids():
    return some_ids()


HEADS, HEAD = 3, 8
WIDTH, LAYERS = HEADS * HEAD, 2


def authors_weights():
    """The tensors of an RWKV-6 in the names of the authors' .pth files."""
    vector = (1, 1, WIDTH)
    attention = {f"{name}.weight": (WIDTH, WIDTH) for name in ("receptance", "key", "value", "output")}
    attention |= {f"time_maa_{name}": vector for name in "xwkvrg"}
    attention |= {
        "time_maa_w1": (WIDTH, 5 * 4), "time_maa_w2": (5, 4, WIDTH), "time_decay": vector,
        "time_decay_w1": (WIDTH, 6), "time_decay_w2": (6, WIDTH), "time_faaaa": (HEADS, HEAD),
        "gate.weight": (WIDTH, WIDTH), "ln_x.weight": (WIDTH,), "ln_x.bias": (WIDTH,),
    }  # fmt: skip
    norm = {"weight": (WIDTH,), "bias": (WIDTH,)}
    shapes = {"emb.weight": (VOCABULARY, WIDTH), "head.weight": (VOCABULARY, WIDTH)}
    parts = {"ln_out": norm, "blocks.0.ln0": norm}
    for i in range(LAYERS):
        parts |= {f"blocks.{i}.ln1": norm, f"blocks.{i}.att": attention}
    shapes |= {f"{prefix}.{name}": shape for prefix, part in parts.items() for name, shape in part.items()}
    torch.manual_seed(2)
    state = {name: torch.empty(shape, dtype=torch.float64) for name, shape in shapes.items()}
    perturb(state.items())
    return state


def under(state, prefix):
    """The tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}


def authors_logits(state, ids):
    """Time mixes of RWKV-6 on one row of tokens, one after the other (Peng et al. 2024, section 4)."""

    def norm(x, name, eps=1e-5):
        return F.layer_norm(x, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"], eps)

    before = torch.zeros(LAYERS, WIDTH, dtype=torch.float64)
    matrices = torch.zeros(LAYERS, HEADS, HEAD, HEAD, dtype=torch.float64)  # [keys, values]
    out = []
    for token in ids:
        x = norm(state["emb.weight"][token], "blocks.0.ln0")
        for i in range(LAYERS):
            w = under(state, f"blocks.{i}.att.")
            y = norm(x, f"blocks.{i}.ln1")
            d, before[i] = before[i] - y, y
            low = torch.tanh((y + d * w["time_maa_x"].flatten()) @ w["time_maa_w1"]).view(5, -1)
            mixed = {}
            for j, name in enumerate("wkvrg"):
                mixed[name] = y + d * (w[f"time_maa_{name}"].flatten() + low[j] @ w["time_maa_w2"][j])
            r, k, v = (w[f"{name}.weight"] @ mixed[name[0]] for name in ("receptance", "key", "value"))
            decay = w["time_decay"].flatten() + torch.tanh(mixed["w"] @ w["time_decay_w1"]) @ w["time_decay_w2"]
            decay, heads = torch.exp(-torch.exp(decay)).view(HEADS, HEAD), []
            for h, (r_h, k_h, v_h) in enumerate(zip(*(z.view(HEADS, HEAD) for z in (r, k, v)), strict=True)):
                now = torch.outer(k_h, v_h)
                o = r_h @ (matrices[i, h] + w["time_faaaa"][h][:, None] * now)
                matrices[i, h] = decay[h][:, None] * matrices[i, h] + now
                heads.append((o - o.mean()) / (o.var(correction=0) + 64e-5).sqrt())
            o = torch.cat(heads) * w["ln_x.weight"] + w["ln_x.bias"]
            x = x + w["output.weight"] @ (o * F.silu(w["gate.weight"] @ mixed["g"]))
        out.append(state["head.weight"] @ norm(x, "ln_out"))
    return torch.stack(out)


NAMES = {
    "emb.": "model.embed_tokens.", "blocks.0.ln0.": "model.embed_norm.", "blocks.{n}.ln1.": "model.layers.{n}.mixer_norm.",
    "blocks.{n}.att.": "model.layers.{n}.mixer.", "ln_out.": "model.norm.", "head.": "lm_head.",
}  # fmt: skip
"""Prefixes of the authors' names -> ours."""


def test_rwkv6_is_the_authors_formula(tmp_path, ids):
    state = authors_weights()
    mixer = {"name": "rwkv6", "head_dim": HEAD, "mix_rank": 4, "decay_rank": 6, "norm_eps": 64e-5}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    more = {"embedding_scale": 1.0, "tie_word_embeddings": False, "pad_token_id": None, "embedding_norm": True}
    block = {"mixer": mixer, "mlp": "none", "norm": "layernorm", "layer_norm_eps": 1e-5}
    ours = lg.LongitudeForCausalLM(lg.LongitudeConfig(**sizes, **more, **block))
    ours.eval().double().load_state_dict(renamed(state, NAMES))
    want = torch.stack([authors_logits(state, row) for row in ids])
    assert want.abs().max() > 0.3
    close(logits(ours, ids), want)
    close(in_steps(ours, ids), want)
    close(logits(ours.float(), ids), want.float(), atol=1e-5)
    ours.save_pretrained(tmp_path)
    close(logits(lg.LongitudeForCausalLM.from_pretrained(tmp_path), ids), want.float(), atol=1e-5)
