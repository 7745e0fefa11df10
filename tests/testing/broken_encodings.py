"""Encodings that break each law on purpose, and one that is right."""

from collections import defaultdict

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


def collected(default):
    """Law -> the classes that break it; a decorator for such a class, of names of laws; and for a subclass of `default`."""
    red = defaultdict(list)

    def breaks(laws):
        def add(kind):
            for law in laws.split():
                red[law].append(kind)
            return kind

        return add

    def broken(name, laws, base=default, **members):
        return breaks(laws)(type(name, (base,), members))

    return red, breaks, broken


RED, breaks, broken = collected(Broken)


# ---- a bias ----------------------------------------------------------------------------------------------------------
broken("InBfloat16", "far_positions", of=lambda self, offset: Broken.of(self, offset).bfloat16())
broken("NotFiniteAhead", "order", of=lambda self, offset: torch.where(offset < 0, -torch.inf, Broken.of(self, offset)))
broken(  # in Python, so that every length makes a graph
    "ReadsLength", "compile", of=lambda self, offset: Broken.of(self, offset) * sum(1.0 for _ in range(offset.shape[0]))
)
broken("SaysAbsolute", "shift", relative=False)


@breaks("far_positions")
class InTheModelsDtype(Broken):
    learned = True

    def __init__(self, num_heads):
        super().__init__(num_heads)
        self.rate = torch.nn.Parameter(torch.ones(()))

    def of(self, offset):
        return -self.rate * offset.abs().to(self.rate.dtype)


@breaks("shared_tables")
class SharesATable(Broken):
    tables = {}

    def of(self, offset):
        return self.tables.setdefault(tuple(offset.shape), super().of(offset))


@breaks("state_dict")
class Saves(Broken):
    def __init__(self, num_heads):
        super().__init__(num_heads)
        self.register_buffer("slopes", torch.ones(num_heads))


@breaks("dtypes weight_decay")
class MovesItsTables(Broken):
    def __init__(self, num_heads):
        super().__init__(num_heads)
        self.register_buffer("slope", torch.tensor(90.3), persistent=False)
        self.hidden = torch.nn.ParameterList([torch.zeros(num_heads, 9)])

    def of(self, offset):
        return (offset * self.slope.double()).cos()


# ---- a table, as `read` gives it -------------------------------------------------------------------------------------
class FromATable(lg.ClippedBias):
    def read(self, offset):
        return self.table

    def terms(self, context):
        return (lg.OffsetBias(lambda offset: self.read(offset)[:, offset.clamp(-9, 9) + 127]),)


broken("DeclaresNothing", "state_dict", lg.ClippedBias, learned=False)
broken("NoGradient", "gradients", FromATable, read=lambda self, offset: self.table.detach())
broken("WrongGradient", "gradients", FromATable, read=lambda self, offset: 2 * self.table - self.table.detach())
broken("SwallowsNaN", "nan_and_inf", FromATable, read=lambda self, offset: self.table.nan_to_num())
broken(  # its table is used where there are several tokens
    "OnlyForSeveral",
    "unused_parameters",
    FromATable,
    read=lambda self, offset: self.table if offset.numel() > 1 else self.table.detach(),
)
broken(
    "NoGradientCompiled",
    "compiled_training",
    FromATable,
    read=lambda self, offset: self.table.detach() if torch.compiler.is_compiling() else self.table,
)


@breaks("grad_modes")
class MadeInInference(FromATable):
    """Keeps what it made in inference_mode, and multiplies with it later."""

    made = 2.0

    def read(self, offset):
        if torch.is_inference_mode_enabled():
            self.made = torch.full((), 2.0, dtype=torch.float64)
        return self.made * self.table


# ---- positions -------------------------------------------------------------------------------------------------------
broken("Absolute", "shift", lg.Sinusoidal, relative=True)


@breaks("wrong_input")
class LeavesATrace(lg.Sinusoidal):
    def embed(self, x, positions):
        torch.set_default_dtype(torch.float64)
        return super().embed(x, positions)


@breaks("wrong_input")
class Asserts(lg.Learned):
    def embed(self, x, positions):
        assert positions.max() < self.max_length
        return x + self.table[positions].to(x.dtype)


@breaks("chunks")
class StaleKeys(lg.Rotary):
    """Rotates by the newest position of the call, which grows while decoding, and claims that keys stay right."""

    def prepare(self, positions, length=None, dtype=torch.float32):
        table = super().prepare(positions, length, dtype)
        return type(table)(*(x * (1 + 0.1 * int(positions.max())) for x in table))


# ---- a stream --------------------------------------------------------------------------------------------------------
broken(
    "ForgetsCarry", "chunks", lg.FoX, context=lambda self, x, carry=None, docs=None: lg.FoX.context(self, x, None, docs)
)
broken(
    "MixesRows", "batch_invariance", lg.FoX, context=lambda self, x, *rest: lg.FoX.context(self, x - x.mean(0), *rest)
)
broken(
    "SeesTheFuture",
    "causality",
    lg.FoX,
    context=lambda self, x, *rest: lg.FoX.context(self, x + x.mean(1, keepdim=True), *rest),
)
broken("HidesItsState", "prompt_lookup", lg.FoX, carries=False)
broken("SaysNothingOfTheFuture", "permutation", lg.CoPE, causal_only=False)


@breaks("far_positions")
class HalfSums(lg.FoX):
    def context(self, x, *rest):
        columns, carry = super().context(x, *rest)
        return {name: column.to(x.dtype) for name, column in columns.items()}, carry


@breaks("refused_calls")
class CountsByItself(lg.FoX):
    """Its sums continue in itself, whatever its caches were given."""

    carries = False

    def context(self, x, carry=None, documents=None):
        before = getattr(self, "sums", None) if x.shape[1] < 9 else None
        before = None if before is not None and len(before) != len(x) else before
        columns, self.sums = super().context(x, before, documents)
        return columns, None


@breaks("packed_documents padding")
class MixesDocuments(lg.PaTH):
    def context(self, x, carry=None, documents=None):
        return super().context(x, carry, None if documents is None else documents * 0)
