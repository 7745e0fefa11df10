"""RWKV-6, which transformers has not, against the authors' formulas token by token; and files with the authors' names."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import longitude as lg
from longitude.checkpoints.families.recurrent import from_recurrent, to_transformers
from tests.checkpoints.recurrent_models import VOCABULARY, in_float64, in_steps, logits, perturb, some_ids
from tests.support import close, refused


@pytest.fixture
def ids():
    return some_ids()


HEADS, HEAD = 3, 8
WIDTH, HIDDEN, LAYERS = HEADS * HEAD, 30, 2


def authors_weights(version=6):
    """The tensors of an RWKV-6 or an RWKV-4 in the names of the authors' .pth files."""
    vector = (1, 1, WIDTH)
    attention = {f"{name}.weight": (WIDTH, WIDTH) for name in ("receptance", "key", "value", "output")}
    channel = {"key.weight": (HIDDEN, WIDTH), "value.weight": (WIDTH, HIDDEN), "receptance.weight": (WIDTH, WIDTH)}
    if version == 6:
        attention |= {f"time_maa_{name}": vector for name in "xwkvrg"}
        attention |= {
            "time_maa_w1": (WIDTH, 5 * 4), "time_maa_w2": (5, 4, WIDTH), "time_decay": vector,
            "time_decay_w1": (WIDTH, 6), "time_decay_w2": (6, WIDTH), "time_faaaa": (HEADS, HEAD),
            "gate.weight": (WIDTH, WIDTH), "ln_x.weight": (WIDTH,), "ln_x.bias": (WIDTH,),
        }  # fmt: skip
        channel |= {"time_maa_k": vector, "time_maa_r": vector}
    else:
        attention |= {"time_decay": (WIDTH,), "time_first": (WIDTH,)}
        attention |= {f"time_mix_{name}": vector for name in "kvr"}
        channel |= {"time_mix_k": vector, "time_mix_r": vector}
    norm = {"weight": (WIDTH,), "bias": (WIDTH,)}
    shapes = {"emb.weight": (VOCABULARY, WIDTH), "head.weight": (VOCABULARY, WIDTH)}
    parts = {"ln_out": norm, "blocks.0.ln0": norm}
    for i in range(LAYERS):
        parts |= {f"blocks.{i}.{name}": part for name, part in (("ln1", norm), ("ln2", norm))}
        parts |= {f"blocks.{i}.att": attention, f"blocks.{i}.ffn": channel}
    shapes |= {f"{prefix}.{name}": shape for prefix, part in parts.items() for name, shape in part.items()}
    torch.manual_seed(2)
    state = {name: torch.empty(shape, dtype=torch.float64) for name, shape in shapes.items()}
    perturb(state.items())
    return state


def under(state, prefix):
    """The tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}


def authors_logits(state, ids):
    """RWKV-6 on one row of tokens, one after the other (Peng et al. 2024, section 4)."""

    def norm(x, name, eps=1e-5):
        return F.layer_norm(x, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"], eps)

    before = torch.zeros(LAYERS, 2, WIDTH, dtype=torch.float64)
    matrices = torch.zeros(LAYERS, HEADS, HEAD, HEAD, dtype=torch.float64)  # [keys, values]
    out = []
    for token in ids:
        x = norm(state["emb.weight"][token], "blocks.0.ln0")
        for i in range(LAYERS):
            w = under(state, f"blocks.{i}.att.")
            y = norm(x, f"blocks.{i}.ln1")
            d, before[i, 0] = before[i, 0] - y, y
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
            w = under(state, f"blocks.{i}.ffn.")
            y = norm(x, f"blocks.{i}.ln2")
            d, before[i, 1] = before[i, 1] - y, y
            k = torch.relu(w["key.weight"] @ (y + d * w["time_maa_k"].flatten())) ** 2
            x = x + torch.sigmoid(w["receptance.weight"] @ (y + d * w["time_maa_r"].flatten())) * (
                w["value.weight"] @ k
            )
        out.append(state["head.weight"] @ norm(x, "ln_out"))
    return torch.stack(out)


NAMES6 = {"emb.": "rwkv.embeddings.", "blocks.": "rwkv.blocks.", "ln_out.": "rwkv.ln_out.", "head.": "head."}
PARTS6 = {".att.": ".attention.", ".ffn.": ".feed_forward.", ".ln0.": ".pre_ln."}
CONFIG6 = {
    "model_type": "rwkv6", "architectures": ["Rwkv6ForCausalLM"], "auto_map": {}, "vocab_size": VOCABULARY, "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS, "attention_hidden_size": WIDTH, "num_attention_heads": 64, "head_size": HEAD,
    "head_size_divisor": 8, "intermediate_size": HIDDEN, "layer_norm_epsilon": 1e-5, "context_length": 4096,
    "rescale_every": 6, "model_version": "6_0", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def written6(folder, state, **config):
    """As the code that comes with RWKV-6 writes it."""
    folder.mkdir()
    for old, new in PARTS6.items():
        state = {name.replace(old, new): tensor for name, tensor in state.items()}
    state = {
        new + name.removeprefix(old): y
        for name, y in state.items()
        for old, new in NAMES6.items()
        if name.startswith(old)
    }
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG6 | config))
    return folder


@pytest.mark.parametrize("form", [".pth", ".safetensors", "folder"])
def test_rwkv6_is_the_authors_formula(form, tmp_path, ids):
    state = authors_weights()
    if form == "folder":
        ours = from_recurrent(written6(tmp_path / "model", state))
        assert ours.config.max_position_embeddings == 4096
    else:
        path = tmp_path / f"model{form}"
        (torch.save if form == ".pth" else save_file)(state, path)
        ours = from_recurrent(path, allow_pickle=True)
    assert ours.dtype == torch.float64
    want = torch.stack([authors_logits(state, row) for row in ids])
    assert want.abs().max() > 0.3
    close(logits(ours, ids), want)
    close(in_steps(ours, ids), want)
    close(logits(ours.float(), ids), want.float(), atol=1e-5)
    ours.save_pretrained(tmp_path / "ours")
    close(logits(lg.LongitudeForCausalLM.from_pretrained(tmp_path / "ours"), ids), want.float(), atol=1e-5)


def test_rwkv4_in_the_authors_file(tmp_path, ids):
    """The same tensors by transformers' names give the same logits."""
    state = authors_weights(4)
    save_file(state, tmp_path / "model.safetensors")
    ours = from_recurrent(tmp_path / "model.safetensors")
    model = to_transformers(ours)
    names = {**NAMES6, **PARTS6, "mix_k": "mix_key", "mix_v": "mix_value", "mix_r": "mix_receptance"}
    held = model.state_dict()
    for name, tensor in state.items():
        for old, new in names.items():
            name = name.replace(old, new)
        assert torch.equal(held[name], tensor), name
    with in_float64():
        close(logits(ours, ids), logits(model, ids))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"head_size": 4}, ("head_size", "4", "8")),
        ({"model_version": "6_1"}, ("model_version", "'6_1'")),
        ({"layer_norm_epsilon": 1e-4}, ("layer_norm_epsilon", "0.0001")),
        ({"use_glu": True}, ("use_glu", "True")),
    ],
)
def test_keys_of_rwkv6_that_are_not_understood(keys, words, tmp_path):
    with refused(*words):
        from_recurrent(written6(tmp_path / "model", authors_weights(), **keys))
