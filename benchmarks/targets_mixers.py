"""What mixers and whole models promise about their cost, and how each promise is measured: `make bench-mixers`.

To add one, add a Target to TARGETS. Unless it says otherwise: float32, one sequence, 256 wide, 4 heads of 64, causal.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import longitude as lg
from decode import decode
from longitude.attention.mixer import MIXERS, Mixer, list_mixers, mixer
from longitude.bench.cases import AttentionShape
from longitude.bench.rows import Row
from longitude.recurrent import (
    gated_delta_rule,
    mamba3,
    orthogonal_features,
    performer,
    retention,
    rwkv4,
    rwkv6,
    rwkv7,
    s4d,
    selective_scan,
    ssd,
)
from longitude.recurrent.base import RecurrentMixer
from longitude.registry import options_of
from networks import HEADS, LAYERS, VOCABULARY, WIDTH
from target import USUAL_TURNS, Call, Session, Target, main, step

HEAD = WIDTH // HEADS
SIZES = {"dim": WIDTH, "num_heads": HEADS, "num_kv_heads": HEADS, "head_dim": HEAD}
BOTH = "forward+backward"


def recurrences() -> list[str]:
    """The names of all mixers with a state of constant size."""
    return [name for name in list_mixers() if issubclass(MIXERS[name], RecurrentMixer)]


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


# ---- recurrences -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Recurrence:
    """run(mode) -> output, and the tensors that a training step wants gradients of."""

    run: Callable[[str], Tensor]
    wanted: list[Tensor]

    @classmethod
    def of(
        cls, formula: Callable[..., tuple[Tensor, Any]], *inputs: Tensor, fixed: tuple[Tensor, ...] = ()
    ) -> Recurrence:
        return cls(lambda mode: formula(*inputs, *fixed, mode=mode)[0], [*inputs])


def formulas(length: int) -> dict[str, Recurrence]:
    """The formula of each recurrent mixer, at the sizes that its layer has at this width."""
    q, k, v, r = (numbers(seed, 1, HEADS, length, HEAD) for seed in range(4))
    unit = F.normalize(k.detach(), dim=-1).requires_grad_()
    decay_of_head = (-numbers(22, 1, HEADS, length).abs()).detach().requires_grad_()
    beta = numbers(23, 1, HEADS, length).sigmoid().detach().requires_grad_()
    wide = numbers(4, 1, HEADS, length, 2 * HEAD)
    log_w = (-numbers(5, 1, HEADS, length, HEAD).exp()).detach().requires_grad_()
    log_clamped = (-math.exp(-0.5) * numbers(24, 1, HEADS, length, HEAD).sigmoid()).detach().requires_grad_()
    share = numbers(25, 1, HEADS, length, HEAD).sigmoid().detach().requires_grad_()
    tokens = [numbers(seed, 1, length, WIDTH) for seed in (6, 7)]
    channels = [numbers(seed, 1, 2 * WIDTH, length) for seed in (8, 9)]
    A = -torch.arange(1.0, 17.0).expand(2 * WIDTH, 16).contiguous().requires_grad_()
    B, C = (numbers(seed, 1, 16, length) for seed in (10, 11))
    inner = numbers(12, 1, 2 * HEADS, length, HEAD)
    decay = (-numbers(13, 1, 2 * HEADS, length).abs()).detach().requires_grad_()
    wide_q, wide_k = (numbers(seed, 1, 2 * HEADS, length, 128) for seed in (26, 27))
    step, half = (numbers(seed, 1, 2 * HEADS, length).sigmoid().detach().requires_grad_() for seed in (28, 29))
    speed = numbers(30, 1, 2 * HEADS, length, 32)
    to_state, from_state = (numbers(seed, 1, 1, length, 128) for seed in (14, 15))
    poles = torch.complex(torch.full((WIDTH, 32), -0.5), torch.pi * torch.arange(32.0).expand(WIDTH, 32))
    mixing = torch.view_as_complex(numbers(16, WIDTH, 32, 2).detach())
    features = orthogonal_features(HEAD, 266).float()
    return {
        "retention": Recurrence.of(retention, q, k, wide),
        "rwkv4": Recurrence.of(rwkv4, numbers(17, WIDTH), numbers(18, WIDTH), *tokens),
        "rwkv6": Recurrence.of(rwkv6, r, k, v, log_w, numbers(19, HEADS, HEAD)),
        "rwkv7": Recurrence.of(rwkv7, r, log_clamped, k, v, unit, share),
        "mamba": Recurrence.of(partial(selective_scan, delta_softplus=True), *channels, A, B, C),
        "mamba2": Recurrence.of(ssd, inner, decay, to_state, from_state),
        "mamba3": Recurrence.of(mamba3, wide_q, wide_k, inner, decay, step, half, speed),
        "gated_deltanet": Recurrence.of(gated_delta_rule, q, unit, wide, decay_of_head, beta),
        "kda": Recurrence.of(gated_delta_rule, q, unit, v, log_w, beta),
        "s4d": Recurrence.of(s4d, numbers(20, 1, WIDTH, length), numbers(21, WIDTH), fixed=(poles, mixing)),
        "performer": Recurrence.of(performer, q, k, v, fixed=(features,)),
    }


def in_pairs(
    session: Session, pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]], passed: str, work: str
) -> list[Row]:
    """Each name's first call, token by token, and its second, in chunks, over the first."""
    calls: dict[str, Call] = {}
    for name, (steps, chunks) in pairs.items():
        calls[f"{name}, steps"] = "plain", "steps", steps
        calls[name] = "ours", "chunks", chunks
    against = {name: f"{name}, steps" for name in pairs}
    return session.compare(calls, against, session.shape(1024, 1, HEADS, HEAD), passed, 2, work)


def loops(session: Session) -> list[Row]:
    """The formula of each recurrent mixer over 1024 tokens with gradients, in chunks over token after token, one call each."""
    pairs = {}
    for name, each in formulas(session.shape(1024).length).items():
        pairs[name] = tuple(step(partial(each.run, mode), each.wanted, True) for mode in ("recurrent", "chunked"))
    return in_pairs(session, pairs, BOTH, "recurrence")


def token_by_token(layer: Mixer, x: Tensor) -> Tensor:
    """The layer's one-step form, with its cache."""
    cache = layer.cache_layer()
    return torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(x.shape[1])], 1)


@torch.no_grad()
def chunked(session: Session) -> list[Row]:
    """The layer of each recurrent mixer over 1024 tokens, in chunks over token by token with its cache."""
    x, pairs = numbers(0, 1, session.shape(1024).length, WIDTH), {}
    torch.manual_seed(0)
    for name in recurrences():
        layer = mixer(name, **of_width(name))
        pairs[name] = partial(token_by_token, layer, x), partial(layer, x)
    return in_pairs(session, pairs, "forward", "recurrent layer")


def of_width(name: str) -> dict[str, int]:
    """The sizes of a mixer's layer in a model of this width."""
    return {option: size for option, size in SIZES.items() if option in options_of(MIXERS[name])}


# ---- the same work through torch.nn --------------------------------------------------------------------------------------
class PlainLatent(nn.Module):
    """The matrix work of lg.attention.LatentAttention with rotary keys, expanded, through torch.nn alone."""

    def __init__(self, own: Any):
        super().__init__()
        self.heads, self.rank, self.nope, self.rope = own.num_heads, own.kv_rank, own.nope_dim, own.rope_dim
        self.q = nn.Linear(own.dim, self.heads * (self.nope + self.rope), bias=False)
        self.down = nn.Linear(own.dim, self.rank + self.rope, bias=False)
        self.norm = nn.RMSNorm(self.rank, eps=1e-6)
        self.up = nn.Linear(self.rank, self.heads * (self.nope + own.value_dim), bias=False)
        self.out = nn.Linear(self.heads * own.value_dim, own.dim, bias=False)
        self.value = own.value_dim

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, -1).transpose(1, 2)
        latent, rotary = self.down(x).split([self.rank, self.rope], -1)
        both = self.up(self.norm(latent)).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = both.split([self.nope, self.value], -1)
        q = torch.cat([q[..., : self.nope], rotated(q[..., self.nope :], cos, sin)], -1)
        rotary = rotated(rotary[:, None], cos, sin).expand(-1, self.heads, -1, -1)
        k = torch.cat([k, rotary], -1)
        # Padded, so that the fused kernel takes it: without, torch's own way is several times as slow.
        v = F.pad(v, (0, q.shape[-1] - self.value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : self.value]
        return self.out(out.transpose(1, 2).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary, neighbours as pairs."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def angles(length: int, dim: int) -> tuple[Tensor, Tensor]:
    """Cos and sin [length, dim / 2]."""
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    return angles.cos(), angles.sin()


def latents() -> tuple[Any, PlainLatent, lg.Encoding]:
    """Ours, torch.nn's with the same weights, and the encoding of ours."""
    torch.manual_seed(0)
    own: Any = mixer("latent", dim=WIDTH, num_heads=HEADS)
    plain = PlainLatent(own)
    pairs = zip((plain.q, plain.down, plain.norm, plain.up, plain.out),
                (own.q_proj, own.kv_down, own.kv_norm, own.kv_up, own.o_proj), strict=True)  # fmt: skip
    for theirs, ours in pairs:
        theirs.load_state_dict(ours.state_dict())
    return own, plain, lg.Rotary(head_dim=own.rope_dim, layout="interleaved")


def against(
    session: Session,
    plain: tuple[nn.Module, Callable[[], Tensor]],
    own: tuple[nn.Module, Callable[[], Tensor]],
    names: tuple[str, str],
    shape: AttentionShape,
    turns: tuple[int, int],
    work: str,
    inputs: tuple[Tensor, ...] = (),
) -> list[Row]:
    """Our module over a plain one, (module, forward) each, forward and with gradients of parameters and inputs."""
    rows = []
    for passed, count in zip(("forward", BOTH), turns, strict=True):
        calls: dict[str, Call] = {}
        for name, kind, (module, forward) in zip(names, ("plain", "ours"), (plain, own), strict=True):
            calls[name] = kind, "auto", step(forward, [*inputs, *module.parameters()], passed == BOTH)
        rows += session.compare(calls, names[0], shape, passed, count, work)
    return rows


def latent(session: Session) -> list[Row]:
    """A layer of 1024 tokens, batch 4, with rotary keys, over the same projections, norm, rotation and attention of torch.nn."""
    shape = session.shape(1024, 4, HEADS, HEAD)
    own, plain, rope = latents()
    x = numbers(0, shape.batch, shape.length, WIDTH)
    tables = angles(shape.length, own.rope_dim)
    pair = (plain, lambda: plain(x, *tables)), (own, lambda: own(x, encoding=rope))
    return against(session, *pair, ("torch.nn", "latent"), shape, (15, 15), "latent attention", (x,))


class PlainSeq2Seq(nn.Module):
    """An encoder-decoder of torch.nn's layers: norms after, ReLU, biases, tied embeddings, no positions."""

    def __init__(self):
        super().__init__()
        sizes: dict[str, Any] = {
            "d_model": WIDTH,
            "nhead": HEADS,
            "dim_feedforward": 4 * WIDTH,
            "dropout": 0.0,
            "batch_first": True,
        }
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), LAYERS, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), LAYERS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        memory = self.encoder(self.embed(source) * WIDTH**0.5)
        out = self.decoder(self.embed(target) * WIDTH**0.5, memory, tgt_mask=causal, tgt_is_causal=True)
        return out @ self.embed.weight.T


def seq2seqs() -> tuple[Any, PlainSeq2Seq]:
    """Ours and torch.nn's, of the same shape; training mode, so that torch.nn does the same in both passes."""
    torch.manual_seed(0)
    config = lg.LongitudeConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, norm="layernorm", norm_position="post", hidden_act="relu", attention_bias=True,
        mlp_bias=True, encoding="none", bos_token_id=0,
    )  # fmt: skip
    from longitude.models import LongitudeForSeq2SeqLM

    return LongitudeForSeq2SeqLM(config).train(), PlainSeq2Seq().train()


def encoder_decoder(session: Session) -> list[Row]:
    """4 + 4 layers as in the original, source and target of 1024 tokens, batch 2, over nn.TransformerEncoder and Decoder."""
    shape = session.shape(1024, 2, HEADS, HEAD)
    own, plain = seq2seqs()
    source, target = (
        torch.randint(VOCABULARY, (shape.batch, shape.length), generator=torch.Generator().manual_seed(seed))
        for seed in (0, 1)
    )
    ids = {"input_ids": source, "decoder_input_ids": target, "use_cache": False}
    pair = (plain, lambda: plain(source, target)), (own, lambda: own(**ids).logits)
    return against(session, *pair, ("torch.nn", "encoder-decoder"), shape, (5, 4), "encoder-decoder")


def over_full(name: str, lengths: dict[int, int], **options: Any) -> Callable[[Session], list[Row]]:
    def measure(session: Session) -> list[Row]:
        """A layer over one of full attention, each with rope if it takes one; lengths: of each, how often it is timed."""
        torch.manual_seed(0)
        full, own = mixer("attention", dim=WIDTH, num_heads=HEADS), mixer(name, dim=WIDTH, num_heads=HEADS, **options)
        rope, rows = lg.Rotary(head_dim=HEAD, layout="half"), []
        own_rope = rope if own.rotates else None
        for length, turns in lengths.items():
            shape = session.shape(length, 1, HEADS, HEAD)
            x = numbers(0, 1, shape.length, WIDTH)
            pair = (full, partial(full, x, encoding=rope)), (own, partial(own, x, encoding=own_rope))
            rows += against(session, *pair, ("attention", name), shape, (turns, turns), f"{name} attention", (x,))
        return rows

    return measure


hierarchical = over_full("hierarchical", {8192: 3, 16384: 2})
"""At 8192 and 16384 tokens."""


def decoding(labels: Callable[[], list[str]]) -> Callable[[Session], list[Row]]:
    def measure(session: Session) -> list[Row]:
        """A step of a decoder of 4 layers behind 32768 tokens over one behind 1024."""
        contexts = [max(16, n // session.shrink) for n in (1024, 32768)]
        found = decode(labels(), contexts, replace(session, repeats=session.turns(USUAL_TURNS)))
        rows = []
        for each in found["rows"]:
            shape = session.shape(each["context"] * session.shrink, 1, HEADS, HEAD)
            kind = "ours" if each["context"] == contexts[-1] else "plain"
            times = {name: each[name] for name in TIMES}
            rows.append(session.row(each["label"], kind, shape, "decoding", "one token", **times))
        return rows

    return measure


TIMES = ("seconds", "seconds_low", "seconds_high", "ratio", "ratio_low", "ratio_high", "against", "turns")


# ---- the set ---------------------------------------------------------------------------------------------------------
TARGETS = (
    Target("recurrent layer in chunks, 1024 tokens", 0.2, "its own steps", chunked),
    Target("formula in chunks, 1024 tokens, forward + backward", 0.2, "its own loop", loops),
    Target("latent attention, 1024 tokens", 1.1, "the same through torch.nn", latent),
    Target("encoder-decoder, 1024 tokens", 1.1, "the same through torch.nn", encoder_decoder),
    Target("hierarchical attention, 8192 and 16384", 1.0, "full attention", hierarchical),
    Target("stick-breaking, 1024 tokens", 1.2, "full attention", over_full("stick_breaking", {1024: 7})),
    Target("128 keys by an indexer, 1024 tokens", 1.2, "full attention", over_full("indexed", {1024: 9}, k_top=128)),
    Target("repositioning (RePo), 1024 tokens", 1.2, "full attention", over_full("repo", {1024: 15})),
    Target("attention and Mamba-2 in parallel, 1024 tokens", 1.2, "full attention", over_full("parallel", {1024: 9})),
    Target("a token behind 32768, recurrent", 1.1, "a token behind 1024", decoding(recurrences)),
    Target("a token behind 32768, hierarchical", 1.5, "a token behind 1024", decoding(lambda: ["hierarchical"])),
)


if __name__ == "__main__":
    sys.exit(main(TARGETS, __doc__, "-mixers"))
