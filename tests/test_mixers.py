"""The laws over every registered mixer, and over mixers that break them on purpose."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from longitude.attention import mixer as registry
from longitude.attention.layers import MultiHeadAttention
from longitude.mixing import mixers as registered_mixers
from longitude.positions.base import sizes
from longitude.recurrent.base import RecurrentMixer, require_mode, require_state, state_dtype
from longitude.recurrent.taps import previous
from longitude.testing import LawBroken, mixers


def of(name, *encoding, **options):
    """A registered mixer with options, beside these encodings."""
    made = mixers.example(name, **options)
    return mixers.MixerExample(made.factory, made.options, encoding)


# ---- options and encodings that the defaults do not reach
VARIANTS = {
    "attention without positions": of("attention"),
    "attention, rope and t5": of("attention", "rope", "t5"),
    "window dilated": of("window", "rope", size=3, step=2),
    "window of one": of("window", "alibi", size=1),
    "latent, full queries": of("latent", "rope", q_rank=None),
    "hierarchical, one softmax, learned": of("hierarchical", "rope", "alibi", combine="softmax", merge="learned"),
    "hierarchical, learned": of("hierarchical", "rope", merge="learned", window=2),
    "hierarchical, window of one": of("hierarchical", "t5", window=1, size_term=False),
    "s4d inv": of("s4d", init="inv"),
    "mamba2, groups": of("mamba2", groups=2, head_dim=8),
}

# ---- every mixer -----------------------------------------------------------------------------------------------------
DOES_NOT_APPLY = ("it has one form",)
LONG = ("pieces", "forms")
"""Laws whose longest sequences are in the slow tier."""


def cases():
    for name, law in mixers.cases():
        yield pytest.param(
            law, mixers.example(name), id=f"{law}-{name}", marks=[pytest.mark.slow] if law == "compile" else []
        )
    for name, build in VARIANTS.items():
        for law in mixers.laws():
            yield pytest.param(law, build, id=f"{law}-{name}", marks=[pytest.mark.slow])


@pytest.mark.parametrize(("law", "build"), list(cases()))
def test_law(law: str | mixers.Law, build: mixers.MixerExample) -> None:
    if law in LONG:
        law = partial(mixers.laws()[law], lengths=(1, 7, 33))
    said = mixers.examine(law, build)
    assert said == mixers.HOLDS or said.startswith(DOES_NOT_APPLY)


@pytest.mark.slow
@pytest.mark.parametrize("law", LONG)
@pytest.mark.parametrize("name", registered_mixers())
def test_law_on_long_sequences(law: str, name: str) -> None:
    law_of = mixers.laws()[law]
    mixers.examine(partial(law_of, lengths=(1, 63, 130)), name)


# ---- a recurrence to break -----------------------------------------------------------------------------------------------
class Decay(RecurrentMixer):
    """y_t = W (sigmoid(G u_t) * h_t), h_t = exp(-softplus(rate)) h_{t-1} + V u_t, u_t = x_t + shift * x_{t-1}."""

    def __init__(self, dim: int, *, mode: str = "chunked", chunk_size: int = 16):
        super().__init__()
        sizes("Decay", dim=dim)
        require_mode("Decay", mode, chunk_size)
        self.dim, self.mode, self.chunk_size = dim, mode, chunk_size
        self.value, self.gate, self.out = (nn.Linear(dim, dim) for _ in range(3))
        self.rate = nn.Parameter(torch.zeros(dim))
        self.shift = nn.Parameter(torch.ones(dim))

    def mix(self, x, state, reset, valid, positions, encoding, tables):
        require_state("Decay", state, {"sums": (x.shape[0], self.dim), "tail": (x.shape[0], 1, self.dim)})
        sums, tail = (None, None) if state is None else state
        before, tail = previous(x, tail, reset, valid)
        u = x + self.shift.to(x.dtype) * before
        h, sums = self.scan(self.value(u).to(state_dtype(x)), sums, reset, valid)
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
        """All pairs of a piece, and what came before it."""
        log_decay = -F.softplus(self.rate.to(v.dtype))
        heard, document = valid.cumsum(1), reset.cumsum(1)
        ago = heard[:, :, None] - heard[:, None, :]
        seen = (document[:, :, None] == document[:, None, :]) & valid[:, None, :]
        seen = seen & torch.ones(v.shape[1], v.shape[1], dtype=torch.bool).tril()
        weights = (ago[..., None].clamp(min=0) * log_decay).exp() * seen[..., None]
        from_before = (heard[..., None] * log_decay).exp() * (document == 0)[..., None]
        h = torch.einsum("btsc,bsc->btc", weights, v) + from_before * sums[:, None]
        return h, h[:, -1]


class HearsTheFuture(Decay):
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


class RunsOnIntoDocuments(Decay):
    def mix(self, x, state, reset, *rest):
        return super().mix(x, state, None, *rest)


class RunsOnOnlyInItsSums(Decay):
    def scan(self, v, sums, reset, valid):
        return super().scan(v, sums, None, valid)


class DecaysOnPadding(Decay):
    def scan(self, v, sums, reset, valid):
        return super().scan(v if valid is None else v * valid[..., None], sums, reset, None)


class HearsPadding(Decay):
    def mix(self, x, state, reset, valid, *rest):
        return super().mix(x, state, reset, None, *rest)


class WrongAtChunks(Decay):
    def scan(self, v, sums, reset, valid):
        half = -F.softplus(self.rate.to(v.dtype)) / 2
        return super().scan(v, None if sums is None else sums * half.exp(), reset, valid)


class WrongInOneForm(Decay):
    def chunk(self, v, sums, reset, valid):
        h, sums = super().chunk(v, sums, reset, valid)
        return h, sums if self.mode == "recurrent" else 1.001 * sums


class ListensToItsBatch(Decay):
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
    """Small to look at, and the whole sequence stays behind it."""

    def mix(self, x, state, *rest):
        out, now = super().mix(x, None if state is None else state[:2], *rest)
        return out, (*now, x.clone()[:, -1:])


class BatchBehind(Decay):
    def mix(self, x, state, *rest):
        out, (sums, tail) = super().mix(x, None if state is None else (state[0].t(), state[1]), *rest)
        return out, (sums.t(), tail)


class SpareParameter(Decay):
    def __init__(self, dim: int, *, mode: str = "chunked", chunk_size: int = 16):
        super().__init__(dim, mode=mode, chunk_size=chunk_size)
        self.spare = nn.Parameter(torch.ones(dim))


class WrongGradient(Decay):
    def mix(self, x, *rest):
        out, state = super().mix(x, *rest)
        return 2 * out - out.detach(), state


class DrawnTable(Decay):
    def __init__(self, dim: int, *, mode: str = "chunked", chunk_size: int = 16):
        super().__init__(dim, mode=mode, chunk_size=chunk_size)
        self.register_buffer("drawn", torch.randn(dim), persistent=False)

    def mix(self, x, *rest):
        out, state = super().mix(x, *rest)
        return out + self.drawn.to(x.dtype), state


class BeginsAtNothing(Decay):
    def __init__(self, dim: int, *, mode: str = "chunked", chunk_size: int = 16):
        super().__init__(dim, mode=mode, chunk_size=chunk_size)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)


class Overflows(Decay):
    def mix(self, x, *rest):
        out, state = super().mix(x, *rest)
        return out + 1e-9 * x.exp(), state


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


class GivesWeightsOfNothing(Decay):
    def forward(self, x, *, return_weights=False, **rest):
        out = super().forward(x, **rest)
        return (out, None) if return_weights else out


class SaysItHasWeights(Decay):
    has_weights = True

    def forward(self, x, *, return_weights=False, **rest):
        return super().forward(x, **rest)


class HidesItsWeights(MultiHeadAttention):
    has_weights = False


class WeighsTwice(MultiHeadAttention):
    def forward(self, x, *, return_weights=False, **rest):
        answer = super().forward(x, return_weights=return_weights, **rest)
        return (answer[0], 2 * answer[1]) if return_weights else answer


class LooksAtItsNumbers(Decay):
    def mix(self, x, *rest):
        return super().mix(x if float(x.sum()) != 0.5 else -x, *rest)


RED = [
    ("pieces", ForgetsItsState),
    ("pieces", ForgetsItsTail),
    ("forms", WrongInOneForm),
    ("forms", WrongAtChunks),
    ("gradients", CutsGradients),
    ("gradients", SpareParameter),
    ("gradients", WrongGradient),
    ("packing", RunsOnIntoDocuments),
    ("packing", RunsOnOnlyInItsSums),
    ("padding", DecaysOnPadding),
    ("padding", HearsPadding),
    ("rows", ListensToItsBatch),
    ("causality", HearsTheFuture),
    ("modes_of_torch", NoisyInTraining),
    ("memory", KeepsEverything),
    ("memory", HoldsAView),
    ("precision", HalfState),
    ("precision", WidensItsOutput),
    ("surgery", BatchBehind),
    ("saved", DrawnTable),
    ("begins_alive", BeginsAtNothing),
    ("finite", Overflows),
    ("wrong_input", TakesAnyMask),
    ("wrong_input", TakesAnyEncoding),
    ("wrong_input", NoOptionIsWrong),
    ("weights", GivesWeightsOfNothing),
    ("weights", SaysItHasWeights),
    ("weights", HidesItsWeights),
    ("weights", WeighsTwice),
    ("compile", LooksAtItsNumbers),
]


@pytest.mark.parametrize("law", mixers.laws())
def test_law_holds_for_a_right_one(law: str) -> None:
    assert (
        mixers.examine(partial(mixers.laws()[law], lengths=(1, 7, 33)) if law in LONG else law, Decay) == mixers.HOLDS
    )


@pytest.mark.parametrize(("law", "broken"), RED, ids=[f"{law}-{kind.__name__}" for law, kind in RED])
def test_law_goes_red(law: str, broken: type) -> None:
    with pytest.raises(LawBroken, match=f"{broken.__name__} breaks the law '{law}'"):
        mixers.examine(law, broken)


def test_every_law_was_seen_red() -> None:
    assert {law for law, _ in RED} == set(mixers.laws())


# ---- the public face ---------------------------------------------------------------------------------------------------
def test_a_newcomer_gets_the_battery_with_no_second_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    registry.register_mixer("newcomer")(Decay)
    assert {law for name, law in mixers.cases() if name == "newcomer"} == set(mixers.laws())
    assert mixers.examine("rows", "newcomer") == mixers.HOLDS


def test_check_takes_names_classes_functions_and_options() -> None:
    without = tuple(set(mixers.laws()) - {"rows", "saved"})
    for mixer in ("attention", Decay, lambda dim: Decay(dim), mixers.example(Decay, mode="parallel")):
        assert mixers.check(mixer, without=without) == {"rows": "holds", "saved": "holds"}
    assert mixers.example(Decay, chunk_size=3)(mode="recurrent").chunk_size == 3
    assert mixers.examine("forms", lambda dim: Decay(dim)).startswith(DOES_NOT_APPLY)


def test_check_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(ValueError, match="unknown mixer 'atention': did you mean 'attention'"):
        mixers.check("atention")
    with pytest.raises(ValueError, match="unknown option 'chunk': did you mean 'chunk_size'"):
        mixers.check(Decay, chunk=1)
    with pytest.raises(ValueError, match="expected names of laws, pieces"):
        mixers.check(Decay, without=("compiled",))
    with pytest.raises(ValueError, match="got a mixer"):
        mixers.check(Decay(16))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="returns a Mixer"):
        mixers.check(lambda: nn.Linear(2, 2))  # type: ignore[arg-type]


def test_fillings_differ_by_seed_and_leave_nothing_at_zero() -> None:
    for name in registered_mixers():
        one, again, other = (dict(mixers.example(name)(seed).named_parameters()) for seed in (0, 0, 1))
        for p in one:
            assert bool(one[p].ne(0).all()), (name, p)
            assert torch.equal(one[p], again[p]) and not torch.equal(one[p], other[p])


def test_bytes_of_a_view_are_those_of_what_it_holds() -> None:
    whole = torch.zeros(100, 8)
    assert mixers.bytes_held([whole[-1:], whole[:1]]) == 100 * 8 * 4
    assert mixers.bytes_held({"a": (torch.zeros(3), torch.zeros(2, dtype=torch.int64))}) == 12 + 16
