"""Encodings that break each law on purpose, and one that is right."""

import torch

import longitude as lg
from longitude.errors import check_sizes


class Broken(lg.Encoding):
    """A bias that is right; subclasses spoil one thing."""

    def __init__(self, num_heads, rate=0.5):
        super().__init__()
        check_sizes("Broken", num_heads=num_heads)
        self.num_heads, self.rate = num_heads, rate

    def of(self, offset):
        return -self.rate * offset.abs().double()

    def terms(self, context):
        return (lg.OffsetBias(lambda offset: self.of(offset).expand(self.num_heads, *offset.shape)),)


class InBfloat16(Broken):
    def of(self, offset):
        return super().of(offset).bfloat16()


class InTheModelsDtype(Broken):
    learned = True

    def __init__(self, num_heads):
        super().__init__(num_heads)
        self.rate = torch.nn.Parameter(torch.ones(()))

    def of(self, offset):
        return -self.rate * offset.abs().to(self.rate.dtype)


class SharesATable(Broken):
    tables = {}

    def of(self, offset):
        key = tuple(offset.shape)
        if key not in self.tables:
            self.tables[key] = super().of(offset)
        return self.tables[key]


class Saves(Broken):
    def __init__(self, num_heads):
        super().__init__(num_heads)
        self.register_buffer("slopes", torch.ones(num_heads))


class MovesItsTables(Broken):
    def __init__(self, num_heads):
        super().__init__(num_heads)
        self.register_buffer("slope", torch.tensor(90.3), persistent=False)
        self.hidden = torch.nn.ParameterList([torch.zeros(num_heads, 9)])

    def of(self, offset):
        return (offset * self.slope.double()).cos()


class NotFiniteAhead(Broken):
    def of(self, offset):
        return torch.where(offset < 0, -torch.inf, super().of(offset))


class SaysAbsolute(Broken):
    relative = False


class ReadsLength(Broken):
    """Depends on the length in Python, so that every length makes a graph."""

    def of(self, offset):
        return super().of(offset) * sum(1.0 for _ in range(offset.shape[0]))


class Absolute(lg.Sinusoidal):
    relative = True


class LeavesATrace(lg.Sinusoidal):
    def embed(self, x, positions):
        torch.set_default_dtype(torch.float64)
        return super().embed(x, positions)


class Asserts(lg.Learned):
    def embed(self, x, positions):
        assert positions.max() < self.max_length
        return x + self.table[positions].to(x.dtype)


class StaleKeys(lg.Rotary):
    """Rotates by the newest position of the call, which grows while decoding, and claims that keys stay right."""

    def prepare(self, positions, length=None, dtype=torch.float32):
        table = super().prepare(positions, length, dtype)
        return type(table)(*(x * (1 + 0.1 * int(positions.max())) for x in table))


class FromATable(lg.ClippedBias):
    """Its own table, as `read` gives it."""

    def read(self, offset):
        return self.table

    def terms(self, context):
        return (lg.OffsetBias(lambda offset: self.read(offset)[:, offset.clamp(-9, 9) + 127]),)


class DeclaresNothing(lg.ClippedBias):
    learned = False


class NoGradient(FromATable):
    def read(self, offset):
        return self.table.detach()


class WrongGradient(FromATable):
    def read(self, offset):
        return self.table.detach() + 2 * (self.table - self.table.detach())


class NoGradientCompiled(FromATable):
    def read(self, offset):
        return self.table.detach() if torch.compiler.is_compiling() else self.table


class OnlyForSeveral(FromATable):
    """Its table is used where there are several tokens."""

    def read(self, offset):
        return self.table if offset.numel() > 1 else self.table.detach()


class SwallowsNaN(FromATable):
    def read(self, offset):
        return self.table.nan_to_num()


class MadeInInference(FromATable):
    """Keeps what it made in inference_mode, and multiplies with it later."""

    made = 2.0

    def read(self, offset):
        if torch.is_inference_mode_enabled():
            self.made = torch.full((), 2.0, dtype=torch.float64)
        return self.made * self.table


class ForgetsCarry(lg.FoX):
    def context(self, x, carry=None, documents=None):
        return super().context(x, None, documents)


class MixesRows(lg.FoX):
    def context(self, x, carry=None, documents=None):
        return super().context(x - x.mean(0), carry, documents)


class SeesTheFuture(lg.FoX):
    def context(self, x, carry=None, documents=None):
        return super().context(x + x.mean(1, keepdim=True), carry, documents)


class HalfSums(lg.FoX):
    def context(self, x, carry=None, documents=None):
        columns, carry = super().context(x, carry, documents)
        return {name: column.to(x.dtype) for name, column in columns.items()}, carry


class CountsByItself(lg.FoX):
    """Its sums continue in itself, whatever its caches were given."""

    carries = False

    def context(self, x, carry=None, documents=None):
        before = getattr(self, "sums", None) if x.shape[1] < 9 else None
        before = None if before is not None and len(before) != len(x) else before
        columns, self.sums = super().context(x, before, documents)
        return columns, None


class HidesItsState(lg.FoX):
    carries = False


class MixesDocuments(lg.PaTH):
    def context(self, x, carry=None, documents=None):
        return super().context(x, carry, None if documents is None else documents * 0)


class SaysNothingOfTheFuture(lg.CoPE):
    causal_only = False
