"""What is read of configs against what their families' classes do: every causal family at toy size, and published configs."""

import warnings
from typing import Any

import pytest

from longitude.checkpoints.config import contradictions
from longitude.checkpoints.reading import class_of, read
from tests.checkpoints.families import FAMILIES, of_published, swept
from tests.checkpoints.published import PUBLISHED

QUICK = ("llama", "gemma3_text", "cohere2", "lfm2")


@pytest.fixture(autouse=True)
def _quiet():
    """Families warn of kernels that are not here, and of options of toys."""
    with warnings.catch_warnings(action="ignore"):
        yield


def quick_or_slow(names: Any, quick: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("family", quick_or_slow(FAMILIES, QUICK))
def test_every_layer_rotates_as_it_is_read(family):
    """Measured frequencies and factors; or a refusal that names a key; or it is said what is unknown."""
    for scheme, (kind, why) in swept(family, ("default", "yarn") if family in QUICK else None).items():
        assert kind in ("equal", "refused", "unknown"), (scheme, why)
        assert kind == "equal" or why


# ---- published configs -----------------------------------------------------------------------------------------------
REFUSED = {
    "Llama 1 7B": "rope_theta",
    "Falcon 7B": "rope_theta",
    "Baichuan 2 13B": "rope_theta",
    "GPT-J 6B": "rotary_dim",
}
"""Config -> the key that its refusal names."""
UNKNOWN = (
    "GPT-2", "StarCoder", "OPT 1.3B", "XGLM 564M", "BLOOM 560M", "Falcon RW 1B", "MPT 7B", "MPT with alibi_bias_max 16",
    "RWKV 4 169M", "Kimi K2 by its own name", "InternLM2 7B",
)  # fmt: skip
"""What else of position they have, or that transformers has no class of them, is said."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    """Read at their real size, as a dict of their file; measured in a toy of their class with their layers and their widths."""
    kind, why = of_published(name)
    if name in REFUSED:
        assert kind == "refused" and REFUSED[name] in why
    else:
        assert kind == ("unknown" if name in UNKNOWN else "equal"), why
        assert (theirs := class_of(PUBLISHED[name])) is None or [*contradictions(PUBLISHED[name], theirs)] == []


def test_there_are_many_published_configs():
    assert len(PUBLISHED) >= 80 and {*REFUSED, *UNKNOWN} <= PUBLISHED.keys()


@pytest.mark.parametrize("name", ["Llama 3.1 8B", "Kimi K2", "OLMo 3 7B", "Gemma 3 4B"])
def test_some_published_configs_at_once(name):
    assert read(PUBLISHED[name]).ropes
