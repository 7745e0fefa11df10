"""Encodings that break each law on purpose, and one that is right."""

from collections import defaultdict

import torch

import longitude as lg
from longitude.errors import check_sizes


class Broken(lg.Encoding):
    """A bias that is right, with a place for what subclasses add; they spoil one thing."""

    def __init__(self, num_heads, rate=0.5):
        super().__init__()
        check_sizes("Broken", num_heads=num_heads)
        self.num_heads, self.rate = num_heads, rate
        self.more()

    def more(self):
        """What subclasses add."""

    def of(self, offset):
        return -self.rate * offset.abs().double()

    def terms(self, context):
        return (lg.terms.OffsetBias(lambda offset: self.of(offset).expand(self.num_heads, *offset.shape)),)


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
def moved_tables(self):
    self.register_buffer("slope", torch.tensor(90.3), persistent=False)
    self.hidden = torch.nn.ParameterList([torch.zeros(self.num_heads, 9)])


broken("InBfloat16", "far_positions", of=lambda self, offset: Broken.of(self, offset).bfloat16())
broken("NotFiniteAhead", "order", of=lambda self, offset: torch.where(offset < 0, -torch.inf, Broken.of(self, offset)))
broken("SaysAbsolute", "shift", relative=False)
broken("Saves", "state_dict", more=lambda self: self.register_buffer("slopes", torch.ones(self.num_heads)))
broken(  # in Python, so that every length makes a graph
    "ReadsLength", "compile", of=lambda self, offset: Broken.of(self, offset) * sum(1.0 for _ in range(offset.shape[0]))
)
broken(  # a choice by size, which would be a condition of an exported graph
    "ChoosesByLength", "export", of=lambda self, o: Broken.of(self, o) if o.shape[-1] < 99 else -self.rate * o.abs()
)
broken(
    "SharesATable",
    "shared_tables",
    tables={},
    of=lambda self, offset: self.tables.setdefault(tuple(offset.shape), Broken.of(self, offset)),
)
broken(
    "MovesItsTables",
    "dtypes weight_decay",
    more=moved_tables,
    of=lambda self, offset: (offset * self.slope.double()).cos(),
)


broken(
    "ReadsAWeight",
    "adapters offloading",
    more=lambda self: setattr(self, "layer", torch.nn.Linear(1, 1)),
    of=lambda self, offset: Broken.of(self, offset) * self.layer.weight[0, 0],
)
broken(
    "HasAScalar",
    "state_dict",
    more=lambda self: setattr(self, "scalar", torch.nn.Parameter(torch.ones(()))),
    learned=True,
)


@breaks("far_positions")
class InTheModelsDtype(Broken):
    learned = True

    def more(self):
        self.rate = torch.nn.Parameter(torch.ones(()))

    def of(self, offset):
        return -self.rate * offset.abs().to(self.rate.dtype)


# ---- a table, as `read` gives it -------------------------------------------------------------------------------------
class FromATable(lg.ClippedBias):
    def read(self, offset):
        return self.table

    def terms(self, context):
        return (lg.terms.OffsetBias(lambda offset: self.read(offset)[:, offset.clamp(-9, 9) + 127]),)


broken("DeclaresNothing", "state_dict", lg.ClippedBias, learned=False)
broken("NoGradient", "gradients", FromATable, read=lambda self, offset: self.table.detach())
broken("WrongGradient", "gradients", FromATable, read=lambda self, offset: 2 * self.table - self.table.detach())
broken("SwallowsNaN", "nan_and_inf", FromATable, read=lambda self, offset: self.table.nan_to_num())
broken(
    "NoGradientCompiled",
    "compiled_training",
    FromATable,
    read=lambda self, offset: self.table.detach() if torch.compiler.is_compiling() else self.table,
)


broken(
    "NoGradientTransformed",
    "transforms",
    FromATable,
    read=lambda self, offset: self.table.detach() if torch._C._are_functorch_transforms_active() else self.table,
)


def made_in_inference(self, offset):
    """Keeps what it made in inference_mode, and multiplies with it later."""
    if torch.is_inference_mode_enabled():
        self.made = torch.full((), 2.0, dtype=torch.float64)
    return self.made * self.table


broken("MadeInInference", "grad_modes", FromATable, made=2.0, read=made_in_inference)


broken(  # a number goes on in the next document
    "CountsAcrossDocuments",
    "places",
    lg.Abacus,
    places=lambda self, ids, documents=None, random_start=False: lg.Abacus.places(self, ids),
)
broken(  # it counts from the last token on
    "LooksAhead",
    "places",
    lg.Abacus,
    places=lambda self, ids, documents=None, random_start=False: lg.Abacus.places(self, ids.flip(1)).flip(1),
)


# ---- positions -------------------------------------------------------------------------------------------------------
def stale_keys(self, positions, length=None, dtype=torch.float32):
    """Rotates by the newest position of the call, which grows while decoding, and claims that keys stay right."""
    table = lg.Rotary.prepare(self, positions, length, dtype)
    return type(table)(*(x * (1 + 0.1 * int(positions.max())) for x in table))


broken("Absolute", "shift", lg.Sinusoidal, relative=True)
broken("StaleKeys", "chunks", lg.Rotary, prepare=stale_keys)


# ---- a stream --------------------------------------------------------------------------------------------------------
def context_of(change, base=lg.FoX):
    """change: of x, the carry and the documents that `context` is given."""
    return lambda self, x, carry=None, docs=None: base.context(self, *change(x, carry, docs))


def half_sums(self, x, *rest):
    columns, carry = lg.FoX.context(self, x, *rest)
    return {name: column.to(x.dtype) for name, column in columns.items()}, carry


broken(
    "ConstantCompiled",
    "compiled_transforms",
    lg.FoX,
    context=context_of(lambda x, *rest: (x.detach() if torch.compiler.is_compiling() else x, *rest)),
)
broken(
    "SumsOverDocuments",
    "nan_in_documents",
    lg.FoX,
    context=context_of(lambda x, carry, docs: (x, carry, None)),
)
broken("ForgetsCarry", "chunks", lg.FoX, context=context_of(lambda x, carry, docs: (x, None, docs)))
broken("MixesRows", "packed_documents", lg.FoX, context=context_of(lambda x, *rest: (x - x.mean(0), *rest)))
broken(
    "SeesTheFuture",
    "causality padding",
    lg.FoX,
    context=context_of(lambda x, *rest: (x + x.mean(1, keepdim=True), *rest)),
)
broken("HidesItsState", "prompt_lookup", lg.FoX, carries=False)
broken("SaysNothingOfTheFuture", "permutation", lg.CoPE, causal_only=False)
broken("HalfSums", "far_positions", lg.FoX, context=half_sums)
broken(
    "MixesDocuments",
    "packed_documents",
    lg.PaTH,
    context=context_of(lambda x, carry, docs: (x, carry, None if docs is None else docs * 0), lg.PaTH),
)
