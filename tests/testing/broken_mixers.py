"""A right recurrence, and mixers that break each law on purpose."""

import torch
import torch.nn.functional as F
from torch import nn

from longitude.attention.layers.multihead import MultiHeadAttention
from longitude.attention.length_dependent import newest
from longitude.attention.masks import Causal, Documents, Padding
from longitude.attention.state_cache import StateLayer
from longitude.errors import check_sizes
from longitude.recurrent.base import RecurrentMixer
from longitude.recurrent.ops.checks import require_state, state_dtype
from longitude.recurrent.ops.short_conv import previous


class Decay(RecurrentMixer):
    """y_t = W (sigmoid(G u_t) * h_t), h_t = exp(-softplus(rate)) h_{t-1} + V u_t, u_t = x_t + shift * x_{t-1}."""

    def __init__(self, dim: int, *, mode: str = "chunked", chunk_size: int = 16):
        super().__init__()
        check_sizes("Decay", dim=dim)
        self.set_mode(mode, chunk_size)
        self.dim = dim
        self.value, self.gate, self.out = (nn.Linear(dim, dim) for _ in range(3))
        self.rate = nn.Parameter(torch.zeros(dim))
        self.shift = nn.Parameter(torch.ones(dim))
        self.more(dim)

    def more(self, dim):
        """What subclasses add."""

    def mix(self, x, state, inputs):
        require_state("Decay", state, {"sums": (x.shape[0], self.dim), "tail": (x.shape[0], 1, self.dim)})
        sums, tail = (None, None) if state is None else state
        before, tail = previous(x, tail, inputs.reset, inputs.valid)
        u = x + self.shift.to(x.dtype) * before
        h, sums = self.scan(self.value(u).to(state_dtype(x)), sums, inputs.reset, inputs.valid)
        return self.out(torch.sigmoid(self.gate(u)) * h.to(x.dtype)), (sums, tail)

    def scan(self, v, sums, reset, valid):
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


class ReadsTheFuture(Decay):
    def mix(self, x, *rest):
        return super().mix(x + x.amax(1, keepdim=True), *rest)


class ForgetsItsState(Decay):
    def mix(self, x, state, *rest):
        return super().mix(x, None, *rest)


class ForgetsItsTail(Decay):
    def mix(self, x, state, *rest):
        out, (sums, tail) = super().mix(x, state, *rest)
        return out, (sums, torch.zeros_like(tail))


class CutsGradients(Decay):
    def mix(self, x, state, *rest):
        return super().mix(x, None if state is None else tuple(part.detach() for part in state), *rest)


class IgnoresDocuments(Decay):
    def mix(self, x, state, inputs):
        return super().mix(x, state, inputs._replace(reset=None))


class IgnoresDocumentsInItsSums(Decay):
    def scan(self, v, sums, reset, valid):
        return super().scan(v, sums, None, valid)


class MasksByNumber(MultiHeadAttention):
    """What the masks of attend() mean: a token sees all that have its number."""

    def forward(self, x, *, mask=Causal(), documents=None, **rest):  # noqa: B008
        if documents is not None:
            mask = mask & Documents(documents) & Padding(documents >= 0)
        return super().forward(x, mask=mask, **rest)


class Placed(Decay):
    """Its outputs depend on positions, which its cache has to count."""

    def mix(self, x, state, inputs):
        return super().mix(x + torch.cos(inputs.positions.to(x.dtype))[..., None], state, inputs)


class CountsFromTheLargest(Placed):
    """Behind the largest position of a call, which may be that of another document."""

    def cache_layer(self):
        class Layer(StateLayer):
            def write(self, owner, state, tokens, positions, documents=None):
                super().write(owner, state, tokens, positions, documents)
                self.newest = newest(positions, tokens)

        return Layer()


class CountsPadding(Placed):
    def cache_layer(self):
        class Layer(StateLayer):
            def write(self, owner, state, tokens, positions, documents=None):
                super().write(owner, state, tokens, positions)

        return Layer()


class DecaysOnPadding(Decay):
    def scan(self, v, sums, reset, valid):
        return super().scan(v if valid is None else v * valid[..., None], sums, reset, None)


class ReadsPadding(Decay):
    def mix(self, x, state, inputs):
        return super().mix(x, state, inputs._replace(valid=None))


class WrongAtChunks(Decay):
    def scan(self, v, sums, reset, valid):
        half = -F.softplus(self.rate.to(v.dtype)) / 2
        return super().scan(v, None if sums is None else sums * half.exp(), reset, valid)


class WrongInOneForm(Decay):
    def chunk(self, v, sums, reset, valid):
        h, sums = super().chunk(v, sums, reset, valid)
        return h, sums if self.mode == "recurrent" else 1.001 * sums


class MixesItsBatch(Decay):
    def mix(self, x, *rest):
        return super().mix(x - x.mean(0), *rest)


class HalfState(Decay):
    def mix(self, x, *rest):
        out, (sums, tail) = super().mix(x, *rest)
        return out, ((sums.bfloat16() if x.dtype == torch.bfloat16 else sums), tail)


class WidensItsOutput(Decay):
    def mix(self, x, *rest):
        out, state = super().mix(x, *rest)
        return out.to(state_dtype(x)), state


class KeepsEverything(Decay):
    def mix(self, x, state, *rest):
        out, now = super().mix(x, None if state is None else state[:2], *rest)
        return out, (*now, x if state is None else torch.cat([state[2], x], 1))


class HoldsAView(Decay):
    """Its state is small, and a view of the whole sequence."""

    def mix(self, x, state, *rest):
        out, now = super().mix(x, None if state is None else state[:2], *rest)
        return out, (*now, x.clone()[:, -1:])


class BatchBehind(Decay):
    def mix(self, x, state, *rest):
        out, (sums, tail) = super().mix(x, None if state is None else (state[0].t(), state[1]), *rest)
        return out, (sums.t(), tail)


class SpareParameter(Decay):
    def more(self, dim):
        self.spare = nn.Parameter(torch.ones(dim))


class WrongGradient(Decay):
    def mix(self, x, *rest):
        out, state = super().mix(x, *rest)
        return 2 * out - out.detach(), state


class DrawnTable(Decay):
    def more(self, dim):
        self.register_buffer("drawn", torch.randn(dim), persistent=False)

    def mix(self, x, *rest):
        out, state = super().mix(x, *rest)
        return out + self.drawn.to(x.dtype), state


class StartsAtNothing(Decay):
    def more(self, dim):
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)


class Overflows(Decay):
    def mix(self, x, *rest):
        out, state = super().mix(x, *rest)
        return out + 1e-9 * x.exp(), state


class SwallowsNaN(Decay):
    def scan(self, v, sums, reset, valid):
        return super().scan(torch.where(v.isnan(), -1e38, v), sums, reset, valid)


class LosesNaNOfItsRates(Decay):
    def chunk(self, *rest):
        self.rate.data.nan_to_num_()
        return super().chunk(*rest)


class Frequencies(Decay):
    """y_t cos(w t), w as large as S4D's: rounded to 16 bits, it is another frequency."""

    def more(self, dim):
        self.frequency = nn.Parameter(torch.linspace(90.0, 97.0, dim))

    def mix(self, x, state, inputs):
        out, state = super().mix(x, state, inputs)
        angle = inputs.positions[..., None] * self.frequency.to(state_dtype(x))
        return (out * angle.cos()).to(x.dtype), state


class NamesNoParameter(Decay):
    undecayed = ("rates",)


class TakesAnyMask(Decay):
    def forward(self, x, *, mask=None, **rest):
        return super().forward(x, **rest)


class TakesAnyEncoding(Decay):
    def refuses(self, encoding):
        return None


class NoOptionIsWrong(Decay):
    def __init__(self, dim: int, *, mode: str = "chunked", chunk_size: int = 16):
        nn.Module.__init__(self)
        self.dim, self.mode, self.chunk_size = dim, mode, chunk_size
        self.value, self.gate, self.out = (nn.Linear(dim, dim) for _ in range(3))
        self.rate = nn.Parameter(torch.zeros(dim))
        self.shift = nn.Parameter(torch.ones(dim))


class NoisyInTraining(Decay):
    def mix(self, x, *rest):
        out, state = super().mix(x, *rest)
        return (F.dropout(out, 0.1) if self.training else out), state


class KeepsWhatInferenceMade(Decay):
    def cache_layer(self):
        class Layer(StateLayer):
            def read(self, owner):
                return self.state

        return Layer()


class Dropping(Decay):
    """Drops what it gives, in training."""

    def __init__(self, dim: int, *, dropout: float = 0.0, mode: str = "chunked", chunk_size: int = 16):
        super().__init__(dim, mode=mode, chunk_size=chunk_size)
        self.dropout = dropout

    def mix(self, x, *rest):
        out, state = super().mix(x, *rest)
        return self.dropped(out), state

    def dropped(self, out):
        return F.dropout(out, self.dropout, self.training)


class DropsWithoutScale(Dropping):
    def dropped(self, out):
        return F.dropout(out, self.dropout, self.training) * ((1 - self.dropout) if self.training else 1)


class DropsNothing(Dropping):
    def dropped(self, out):
        return out


class UsesItOnlyFar(Decay):
    """A parameter that only a second token uses."""

    def more(self, dim):
        self.far = nn.Parameter(torch.ones(dim))

    def mix(self, x, *rest):
        out, state = super().mix(x, *rest)
        return (out if x.shape[1] == 1 else out * self.far.to(x.dtype)), state


class TakesAnyPositions(Decay):
    def forward(self, x, *, positions=None, **rest):
        return super().forward(x, **rest)


class CropsWhatItCannot(Decay):
    """Reduces the count, and refuses."""

    def cache_layer(self):
        class Layer(StateLayer):
            def require_crop(self, tokens_to_remove):
                self.seen += tokens_to_remove
                super().require_crop(tokens_to_remove)

        return Layer()


class AcceptsAnyCrop(Decay):
    def cache_layer(self):
        class Layer(StateLayer):
            def require_crop(self, tokens_to_remove):
                self.seen += tokens_to_remove

        return Layer()


class TakesNothingBack(Decay):
    """Declares that its cache keeps every token, and cannot remove one."""

    growth = "O(N)"


class GivesWeightsOfNothing(Decay):
    def forward(self, x, *, return_weights=False, **rest):
        out = super().forward(x, **rest)
        return (out, None) if return_weights else out


class DeclaresWeights(Decay):
    has_weights = True

    def forward(self, x, *, return_weights=False, **rest):
        return super().forward(x, **rest)


class HidesItsWeights(MultiHeadAttention):
    has_weights = False


class WeighsTwice(MultiHeadAttention):
    def forward(self, x, *, return_weights=False, **rest):
        answer = super().forward(x, return_weights=return_weights, **rest)
        return (answer[0], 2 * answer[1]) if return_weights else answer


class BranchesOnItsNumbers(Decay):
    def mix(self, x, *rest):
        return super().mix(x if float(x.sum()) != 0.5 else -x, *rest)
