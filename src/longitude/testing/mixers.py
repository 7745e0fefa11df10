"""The laws every mixer must obey, attention in its forms and recurrences, for yours too.

    from longitude.testing import mixers

    mixers.check("mamba")                       # a registered name,
    mixers.check(MyMixer, chunk_size=8)         # a class, with options,
    mixers.check(lambda dim: MyMixer(dim))      # or anything that builds a fresh one for the toy size

The functions are those of longitude.testing. Laws test what a mixer declares: `scores`, `rotates`, `has_weights`, `growth`.
Most laws need transformers, as caches do. The one law that cannot be here is that the numbers equal the published ones.
"""

from longitude.testing.engine import DoesNotApply, Law, LawBroken, Result
from longitude.testing.examples import MIXER_LAWS, MixerExample, mixer_example as example
from longitude.testing.fixtures import bytes_held, tensors_held

law, laws, cases = MIXER_LAWS.law, MIXER_LAWS.laws, MIXER_LAWS.cases
examine, check = MIXER_LAWS.examine, MIXER_LAWS.check

__all__ = [
    "DoesNotApply", "Law", "LawBroken", "MixerExample", "Result", "bytes_held", "cases", "check", "examine",
    "example", "laws", "law", "tensors_held",
]  # fmt: skip
