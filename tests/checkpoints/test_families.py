"""What is read of configs against what their families' classes do: every causal family at toy size, and published configs."""

import warnings
from typing import Any

import pytest

from longitude.checkpoints.reading import class_of, read, text_part
from tests.checkpoints.families import FAMILIES, OPTIONS, compared, swept
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
SMALL = {
    "vocab_size": 96, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "vocab_size_per_layer_input": 96, "shared_expert_intermediate_size": 32, "index_n_heads": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_heads": 2, "linear_head_dim": 16, "o_lora_rank": 16, "n_shared_experts": 1,
}  # fmt: skip
POSITION = (
    "head_dim",
    "sliding_window",
    "qk_rope_head_dim",
    "num_layers",
    "n_layers",
    "n_layer",
    "max_seq_len",
    "n_positions",
)


def small(raw: dict[str, Any]) -> Any:
    """The class's config of a published one, with its layers and its rotated widths, and everything else as small as a toy."""
    theirs, given = class_of(raw), dict(text_part(raw))
    has, heads = {*theirs.to_dict(), *type(theirs).attribute_map}, given.get("num_attention_heads")
    more = {key: each for key, each in {**OPTIONS, **SMALL}.items() if key in has and key not in POSITION}
    if heads and given.get("head_dim") is None and read(raw).ropes:  # then their width is that of the model over them
        more["hidden_size"] = 2 * (given["hidden_size"] // heads)
    if "num_key_value_heads" in has:
        more["num_key_value_heads"] = (
            2 if "kv_lora_rank" in has or given.get("num_key_value_heads") in (None, heads) else 1
        )
    if "mamba_d_head" in has:
        more |= {"mamba_n_heads": 4, "mamba_d_head": more["hidden_size"] // 2, "mamba_d_ssm": 2 * more["hidden_size"]}
    return type(theirs)(**{key: each for key, each in (given | more).items() if key != "model_type"})


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    """Read at their real size, as a dict of their file; measured in a toy of their class with their layers and their widths."""
    raw = PUBLISHED[name]
    kind, why = compared(raw, None if name in REFUSED or name in UNKNOWN or class_of(raw) is None else small(raw))
    if name in REFUSED:
        assert kind == "refused" and REFUSED[name] in why
    else:
        assert kind == ("unknown" if name in UNKNOWN else "equal"), why


def test_there_are_many_published_configs():
    assert len(PUBLISHED) >= 80 and {*REFUSED, *UNKNOWN} <= PUBLISHED.keys()


@pytest.mark.parametrize("name", ["Llama 3.1 8B", "Kimi K2", "OLMo 3 7B", "Gemma 3 4B"])
def test_some_published_configs_at_once(name):
    assert read(PUBLISHED[name]).ropes
