"""A right recurrence, and mixers that break each law on purpose.

Decay has a place for each change: what `mix` is given (before), what it gives (after), its scan, its chunks, its cache.
"""

import torch
import torch.nn.functional as F
from torch import nn

from longitude.attention.cache import LongitudeCacheLayer, StateLayer
from longitude.attention.layers.multihead import MultiHeadAttention
from longitude.attention.length_dependent import newest
from longitude.attention.masks import Causal, Documents, Padding
from longitude.attention.short_conv import previous
from longitude.errors import check_sizes
from longitude.native.not_finite import nan_in_its_document
from longitude.recurrent.base import RecurrentMixer
from longitude.recurrent.ops.checks import require_mode, require_state, state_dtype
from tests.testing.broken_encodings import collected


class Decay(RecurrentMixer):
    """y_t = W (sigmoid(G u_t) * h_t), h_t = exp(-softplus(rate)) h_{t-1} + V u_t, u_t = x_t + shift * x_{t-1}."""

    def __init__(self, dim: int, *, mode: str = "chunked", chunk_size: int = 16):
        super().__init__()
        check_sizes("Decay", dim=dim)
        require_mode("Decay", mode, chunk_size)
        self.dim, self.mode, self.chunk_size = dim, mode, chunk_size
        self.value, self.gate, self.out = (nn.Linear(dim, dim) for _ in range(3))
        self.rate = nn.Parameter(torch.zeros(dim))
        self.shift = nn.Parameter(torch.ones(dim))
        self.more(dim)

    def more(self, dim):
        """What subclasses add."""

    def before(self, x, state, inputs):
        """What subclasses change in the arguments of mix."""
        return x, state, inputs

    def after(self, x, out, state):
        """What subclasses change in the results of mix."""
        return out, state

    def mix(self, x, state, inputs):
        return self.after(x, *self.recur(*self.before(x, state, inputs)))

    def recur(self, x, state, inputs):
        require_state("Decay", state, {"sums": (x.shape[0], self.dim), "tail": (x.shape[0], 1, self.dim)})
        sums, tail = (None, None) if state is None else state
        before, tail = previous(x, tail, inputs.reset, inputs.valid)
        u = x + self.shift.to(x.dtype) * before
        h, sums = self.scan(self.value(u).to(state_dtype(x)), sums, inputs.reset, inputs.valid)
        return self.out(torch.sigmoid(self.gate(u)) * h.to(x.dtype)), (sums, tail)

    def scan(self, v, sums, reset, valid):
        [v], sums, back = nan_in_its_document(1, [v], [] if sums is None else [sums], reset, valid)
        h, sums = self.scan_numbers(v, sums[0] if sums else None, reset, valid)
        h, [sums] = back(h, [sums])
        return h, sums

    def scan_numbers(self, v, sums, reset, valid):
        batch, length, _ = v.shape
        sums = torch.zeros_like(v[:, 0]) if sums is None else sums
        reset = torch.zeros(batch, length, dtype=torch.bool) if reset is None else reset
        valid = torch.ones(batch, length, dtype=torch.bool) if valid is None else valid
        size = {"parallel": length, "chunked": self.chunk_size, "recurrent": 1}[self.mode]
        parts = []
        for a in range(0, length, size):
            part, sums = self.chunk(v[:, a : a + size], sums, reset[:, a : a + size], valid[:, a : a + size])
            parts.append(part)
        return torch.cat(parts, 1), sums

    def chunk(self, v, sums, reset, valid):
        """All pairs of a chunk, and the state before it."""
        log_decay = -F.softplus(self.rate.to(v.dtype))
        tokens, document = valid.cumsum(1), reset.cumsum(1)
        ago = tokens[:, :, None] - tokens[:, None, :]
        seen = (document[:, :, None] == document[:, None, :]) & valid[:, None, :]
        seen = seen & torch.ones(v.shape[1], v.shape[1], dtype=torch.bool).tril()
        weights = (ago[..., None].clamp(min=0) * log_decay).exp() * seen[..., None]
        from_before = (tokens[..., None] * log_decay).exp() * (document == 0)[..., None]
        h = torch.einsum("btsc,bsc->btc", weights, v) + from_before * sums[:, None]
        return h, h[:, -1]


class Placed(Decay):
    """Its outputs depend on positions, which its cache has to count."""

    def before(self, x, state, inputs):
        return x + torch.cos(inputs.positions.to(x.dtype))[..., None], state, inputs


class Dropping(Decay):
    """Drops what it gives, in training."""

    def __init__(self, dim: int, *, dropout: float = 0.0, mode: str = "chunked", chunk_size: int = 16):
        super().__init__(dim, mode=mode, chunk_size=chunk_size)
        self.dropout = dropout

    def after(self, x, out, state):
        return F.dropout(out, self.dropout, self.training), state


RED, breaks, broken = collected(Decay)


def with_cache(name, laws, base=Decay, layer=StateLayer, **members):
    """A mixer whose cache has the bug."""
    broken(name, laws, base, cache_layer=lambda self: type("Layer", (layer,), members)())


# ---- what it reads ---------------------------------------------------------------------------------------------------
broken("ReadsTheFuture", "causality", before=lambda self, x, s, i: (x + x.amax(1, keepdim=True), s, i))
broken("MixesItsBatch", "packed_documents nan_and_inf", before=lambda self, x, s, i: (x - x.mean(0), s, i))
broken("ForgetsItsState", "chunks", before=lambda self, x, s, i: (x, None, i))
broken("CutsGradients", "gradients", before=lambda self, x, s, i: (x, s and tuple(part.detach() for part in s), i))
broken(
    "IgnoresDocuments",
    "packed_documents documents_across_calls",
    before=lambda self, x, s, i: (x, s, i._replace(reset=None)),
)
broken("TakesNaNForZero", "nan_and_inf", before=lambda self, x, s, i: (x.nan_to_num(), s, i))
broken("ReadsPadding", "padding", before=lambda self, x, s, i: (x, s, i._replace(valid=None)))
broken(
    "BranchesOnItsNumbers",
    "compiled_training transforms",
    before=lambda self, x, s, i: (x if float(x.sum()) != 0.5 else -x, s, i),
)


broken(
    "ConstantCompiled",
    "compiled_transforms",
    before=lambda self, x, s, i: (x.detach() if torch.compiler.is_compiling() else x, s, i),
)


# ---- what it gives ---------------------------------------------------------------------------------------------------
broken("ForgetsItsTail", "chunks", after=lambda self, x, out, s: (out, (s[0], torch.zeros_like(s[1]))))
broken("WidensItsOutput", "precision dtypes", after=lambda self, x, out, s: (out.to(state_dtype(x)), s))
broken("WrongGradient", "gradients", after=lambda self, x, out, s: (2 * out - out.detach(), s))
broken("Overflows", "extreme_inputs", after=lambda self, x, out, s: (out + 1e-9 * x.exp(), s))
broken("HalfState", "precision", after=lambda self, x, out, s: (out, (s[0].to(x.dtype), s[1])))
broken("NoisyInTraining", "grad_modes", after=lambda self, x, out, s: (F.dropout(out, 0.1, self.training), s))
broken("DropsNothing", "dropout", Dropping, after=lambda self, x, out, s: (out, s))
broken(
    "BatchBehind",
    "cache_operations",
    before=lambda self, x, s, i: (x, s and (s[0].t(), s[1]), i),
    after=lambda self, x, out, s: (out, (s[0].t(), s[1])),
)
broken("SpareParameter", "gradients", more=lambda self, dim: setattr(self, "extra", nn.Parameter(torch.ones(dim))))

broken(
    "DropsWithoutScale",
    "dropout",
    Dropping,
    after=lambda self, x, out, s: (F.dropout(out, self.dropout, self.training) * (1 - self.dropout * self.training), s),
)
broken(
    "DrawnTable",
    "state_dict",
    more=lambda self, dim: self.register_buffer("drawn", torch.randn(dim), persistent=False),
    after=lambda self, x, out, s: (out + self.drawn.to(x.dtype), s),
)
broken("HasAScalar", "state_dict", more=lambda self, dim: setattr(self, "scalar", nn.Parameter(torch.ones(()))))
broken(
    "ReadsAWeight",
    "adapters offloading",
    more=lambda self, dim: setattr(self, "extra", nn.Linear(dim, dim)),
    after=lambda self, x, out, s: (F.linear(out, self.extra.weight), s),
)
broken("StartsAtNothing", "initialization", more=lambda self, dim: [nn.init.zeros_(p) for p in self.out.parameters()])


@breaks("memory")
class KeepsEverything(Decay):
    def mix(self, x, state, inputs):
        out, now = super().mix(x, state and state[:2], inputs)
        return out, (*now, self.kept(x if state is None else torch.cat([state[2], x], 1)))

    def kept(self, x):
        return x


broken("HoldsAView", "memory", KeepsEverything, kept=lambda self, x: x.clone()[:, -1:])  # small, of the whole sequence


@breaks("dtypes")
class Frequencies(Decay):
    """y_t cos(w t), w as large as S4D's: rounded to 16 bits, it is another frequency."""

    def more(self, dim):
        self.frequency = nn.Parameter(torch.linspace(90.0, 97.0, dim))

    def mix(self, x, state, inputs):
        out, state = super().mix(x, state, inputs)
        angle = inputs.positions[..., None] * self.frequency.to(state_dtype(x))
        return (out * angle.cos()).to(x.dtype), state


# ---- its recurrence --------------------------------------------------------------------------------------------------
def decays_on_padding(self, v, sums, reset, valid):
    return Decay.scan(self, v if valid is None else v * valid[..., None], sums, reset, None)


def wrong_in_one_form(self, *given):
    h, sums = Decay.chunk(self, *given)
    return h, sums if self.mode == "recurrent" else 1.001 * sums


def loses_nan_of_its_rates(self, *given):
    self.rate.data.nan_to_num_()
    return Decay.chunk(self, *given)


broken("EndsDocumentsByZeros", "nan_in_documents", scan=lambda self, *given: self.scan_numbers(*given))
broken("DecaysOnPadding", "padding", scan=decays_on_padding)
broken("WrongInOneForm", "forms", chunk=wrong_in_one_form)
broken("LosesNaNOfItsRates", "nan_and_inf", chunk=loses_nan_of_its_rates)


# ---- its cache -------------------------------------------------------------------------------------------------------
def counts_from_the_largest(self, owner, state, tokens, positions, documents=None):
    """Behind the largest position of a call, which may be that of another document."""
    StateLayer.write(self, owner, state, tokens, positions, documents)
    self.newest = newest(positions, tokens)


def counts_padding(self, owner, state, tokens, positions, documents=None):
    StateLayer.write(self, owner, state, tokens, positions)


def accepts_any_crop(self, tokens_to_remove):
    self.seen += tokens_to_remove


with_cache(
    "CountsFromTheLargest",
    "packed_documents documents_across_calls",
    Placed,
    write=counts_from_the_largest,
)
with_cache("CountsPadding", "padding", Placed, write=counts_padding)
with_cache("KeepsWhatInferenceMade", "grad_modes", read=lambda self, owner: self.state)
with_cache("AcceptsAnyCrop", "cache_operations", require_crop=accepts_any_crop)
with_cache(
    "CropsNothing", "prompt_lookup", MultiHeadAttention, LongitudeCacheLayer, _crop=lambda self, tokens_to_remove: None
)
broken("TakesNothingBack", "prompt_lookup", growth="O(N)")  # declares that its cache keeps every token


# ---- its arguments and declarations ----------------------------------------------------------------------------------
broken("NamesNoParameter", "weight_decay", undecayed=("rates",))


def without(*names, base=Decay):
    """forward, which takes arguments of these names and loses them."""
    return lambda self, x, **given: base.forward(self, x, **{n: y for n, y in given.items() if n not in names})


broken("DeclaresWeights", "attention_weights", has_weights=True, forward=without("return_weights"))
broken("HidesItsWeights", "attention_weights", MultiHeadAttention, has_weights=False)


def weights_of_nothing(self, x, *, return_weights=False, **rest):
    out = Decay.forward(self, x, **rest)
    return (out, None) if return_weights else out


def weighs_twice(self, x, *, return_weights=False, **rest):
    answer = MultiHeadAttention.forward(self, x, return_weights=return_weights, **rest)
    return (answer[0], 2 * answer[1]) if return_weights else answer


def masks_by_number(self, x, *, mask=Causal(), documents=None, **rest):  # noqa: B008
    """What the masks of attend() mean: a token sees all that have its number."""
    if documents is not None:
        mask = mask & Documents(documents) & Padding(documents >= 0)
    return MultiHeadAttention.forward(self, x, mask=mask, **rest)


broken("GivesWeightsOfNothing", "attention_weights", forward=weights_of_nothing)
broken("WeighsTwice", "attention_weights", MultiHeadAttention, forward=weighs_twice)
broken("MasksByNumber", "packed_documents", MultiHeadAttention, forward=masks_by_number)
