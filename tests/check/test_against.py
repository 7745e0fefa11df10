"""What an engine or a second checkpoint believes of a checkpoint."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma3ForCausalLM

from longitude.check.against import FORMS, against
from longitude.checkpoints.load import load
from longitude.positions.rotation import convert_layout
from longitude.serving.gguf import GGUF, LONG, SHORT
from tests.check.building import LENGTH, TRAINED, WIDTH, YARN, by_layer, file_of, finished, llama
from tests.support import edit_config, refused

gguf = pytest.importorskip("gguf")
HEADS, KEYS, DIM = 4, 2, 8
FACTOR = 0.1 * math.log(4.0) + 1  # of YaRN at four times the length
REORDERED = FORMS["interleaved"]
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = LENGTH // 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    llama(rope=YARN | {"rope_theta": 5e5}).save_pretrained(folder)
    return folder


def written(folder, path, permuted=True, architecture="llama", dim=DIM, factors=None, lists=(), **changes):
    """A GGUF file of a Llama as llama.cpp's converter makes one: rows of queries and keys in pairs of neighbours."""
    config = json.loads((folder / "config.json").read_text())
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer = gguf.GGUFWriter(path, architecture)
    given = {
        "block_count": config["num_hidden_layers"], "head_count": HEADS, "head_count_kv": KEYS, "embedding_length": 32,
        "context_length": config["max_position_embeddings"], "rope_freq_base": rope["rope_theta"],
        "rope_dimension_count": dim,
    }  # fmt: skip
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        given |= {"rope_scaling_factor": rope["factor"], "rope_scaling_orig_ctx_len": original}
    for name, value in (given | changes).items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    for name, numbers in zip(("rope_factors_short.weight", "rope_factors_long.weight"), lists):
        writer.add_tensor(name, torch.tensor(numbers).numpy())
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.float().numpy())
    for name, weight in load_file(folder / "model.safetensors").items():
        for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
            if ours in name:
                layout = convert_layout(weight, dim, "interleaved") if permuted else weight
                writer.add_tensor(f"blk.{name.split('.')[2]}.{theirs}.weight", layout.float().numpy())
    return finished(writer)


def wrong(facts):
    return {fact.name: (fact.here, fact.there) for fact in facts if fact.differs}


def test_a_file_of_the_converter_contradicts_nothing(checkpoint, tmp_path):
    facts = {fact.name: fact for fact in against(checkpoint, written(checkpoint, tmp_path / "right.gguf"))}
    assert wrong(facts.values()) == {}
    assert facts["base"].there == 5e5 and facts["factor"].here == 4.0 and facts["scaling"].there == "yarn"
    assert facts["pairs"].there == "interleaved" and facts["queries and keys"].there == REORDERED


@pytest.mark.parametrize(
    ("changes", "name", "values"),
    [
        ({"rope_scaling_attn_factors": 0.5}, "attention factor", (FACTOR, FACTOR / 2)),
        ({"rope_scaling_orig_ctx_len": LENGTH}, "original length", (LENGTH // 4, LENGTH)),
        ({"context_length": 4 * LENGTH}, "declared length", (LENGTH, 4 * LENGTH)),
        ({"head_count_kv": HEADS}, "heads of keys", (KEYS, HEADS)),
        ({"rope_dimension_count": DIM // 2}, "rotated dimensions", (DIM, DIM // 2)),
        ({"permuted": False}, "queries and keys", (f"expected {REORDERED}", "the same")),
        ({"architecture": "qwen2"}, "queries and keys", ("expected the same", REORDERED)),
    ],
)
def test_what_differs_is_named(changes, name, values, checkpoint, tmp_path):
    assert wrong(against(checkpoint, written(checkpoint, tmp_path / "wrong.gguf", **changes))) == {name: values}


@pytest.mark.parametrize(
    ("changes", "values", "pair"),
    [
        ({"rope_freq_base": None}, {"base": (5e5, 10_000.0)}, 3),  # what llama.cpp takes where the file has none
        ({"rope_scaling_factor": 2.0}, {"factor": (4.0, 2.0)}, 1),
    ],
)
def test_what_changes_frequencies_is_named_with_them(changes, values, pair, checkpoint, tmp_path):
    found = wrong(against(checkpoint, written(checkpoint, tmp_path / "wrong.gguf", **changes)))
    assert values.items() <= found.items() and f"pair {pair}:" in found["frequencies"][1]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("rope", "changes", "factors", "found"),
    [
        ({"rope_type": "default"}, {}, [1.0] * 4, set()),  # nothing is divided: two names of one rotation
        ({"rope_type": "linear", "factor": 4.0}, {"rope_scaling_factor": 4.0}, None, set()),  # no type: linear
        ({"rope_type": "default"}, {"rope_scaling_factor": 4.0}, None, {"scaling", "frequencies"}),
        ({"rope_type": "linear", "factor": 4.0}, {"rope_scaling_factor": 4.0}, [1.0, 1.0, 2.0, 8.0], {"frequencies"}),
        ({"rope_type": "dynamic", "factor": 4.0}, {}, None, {"scaling"}),  # the same at the training length alone
        (YARN, {}, [1.0, 1.0, 2.0, 8.0], {"frequencies"}),
        (LLAMA3, {}, None, {"scaling", "frequencies"}),  # the factors that the converter writes are lost
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, {}, [1.0, 1.0, 1e30, 1e30], set()),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, {}, [1.0] * 4, {"scaling", "frequencies"}),
    ],
)
def test_factors_divide_whatever_the_scheme_is_and_names_prove_nothing(rope, changes, factors, found, tmp_path):
    llama(rope=rope | {"rope_theta": 1e4}).save_pretrained(tmp_path / "model")
    factors = None if factors is None else torch.tensor(factors)
    file = written(tmp_path / "model", tmp_path / "one.gguf", factors=factors, **changes)
    assert {fact.name for fact in against(tmp_path / "model", file) if fact.differs} == found


def test_the_lists_of_longrope_are_compared(tmp_path):
    """Short ones of 1 would hide that the long ones were lost."""
    lists = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    llama(
        rope={"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": LENGTH // 4, **lists}
    ).save_pretrained(tmp_path / "model")
    for long, differs in (([1.0, 2.0, 3.0, 4.0], False), ([1.0, 2.0, 3.5, 4.0], True)):
        file = written(tmp_path / "model", tmp_path / "one.gguf", lists=(lists["short_factor"], long))
        facts = {fact.name: fact for fact in against(tmp_path / "model", file)}
        assert not facts["frequencies"].differs
        assert facts["frequencies beyond the original length"].differs == differs
    assert LONG in wrong(against(tmp_path / "model", written(tmp_path / "model", tmp_path / "lost.gguf")))


# ---- the engine's own formula ------------------------------------------------------------------------------------------------
POSITION = 37
SOME = [1.0, 1.0, 1.5, 2.0, 4.0, 4.0, 8.0, 8.0]
MORE = [1.0, 2.0, 2.0, 3.0, 5.0, 8.0, 8.0, 9.0]
OTHERS = {"beta_fast": 8.0, "beta_slow": 2.0}


def engines_angles(factors=None, scale=1.0, yarn=None):
    """llama.cpp's loop over the pairs of a head at one position (rope_yarn and ggml_rope_cache_init of ggml-cpu/ops.cpp)."""

    def last(turns):
        return WIDTH * math.log(TRAINED / (turns * 2 * math.pi)) / (2 * math.log(1e4))

    theta, angles = float(POSITION), []
    for pair in range(WIDTH // 2):
        angle = plain = theta / (1.0 if factors is None else factors[pair])
        angle *= scale
        if yarn is not None:
            low, high = max(0, math.floor(last(yarn["beta_fast"]))), min(WIDTH - 1, math.ceil(last(yarn["beta_slow"])))
            mix = 1 - min(1, max(0, (pair - low) / max(0.001, high - low)))
            angle = angle * (1 - mix) + plain * mix
        angles.append(angle)
        theta *= 1e4 ** (-2 / WIDTH)
    return angles


FREQS, LISTS = {"rope_freqs": SOME}, {"rope_factors_short": SOME, "rope_factors_long": MORE}
TYPE, BY = "scaling__type", {"scaling__factor": 4.0}
FOUR = {TYPE: "yarn"} | BY
BETAS = {f"scaling__yarn_{name}": value for name, value in OTHERS.items()}
PUBLISHED = {"beta_fast": 32.0, "beta_slow": 1.0}


@pytest.mark.parametrize(
    ("file", "short", "long"),
    [
        ({"tensors": FREQS}, {"factors": SOME}, None),
        ({"tensors": FREQS} | BY, {"factors": SOME, "scale": 0.25}, None),  # without a type: linear
        ({"tensors": FREQS, "scale_linear": 4.0}, {"factors": SOME, "scale": 0.25}, None),  # the older key
        ({"tensors": FREQS, TYPE: "none"} | BY, {"factors": SOME}, None),
        ({"tensors": FREQS} | FOUR, {"factors": SOME, "scale": 0.25, "yarn": PUBLISHED}, None),
        ({"tensors": LISTS, TYPE: "longrope"}, {"factors": SOME}, {"factors": MORE}),
        ({"tensors": LISTS, TYPE: "longrope"} | BY, {"factors": SOME, "scale": 0.25}, {"factors": MORE, "scale": 0.25}),
        ({"tensors": LISTS | FREQS}, {"factors": SOME}, None),  # the one tensor is taken before the two
        ({"tensors": {"rope_factors_long": MORE}, TYPE: "longrope"}, {}, {"factors": MORE}),
        (FOUR | BETAS, {"scale": 0.25, "yarn": PUBLISHED}, None),  # not read for a Llama
        ({"architecture": "mistral3"} | FOUR | BETAS, {"scale": 0.25, "yarn": OTHERS}, None),
    ],
)
def test_frequencies_are_those_of_the_engines_formula(file, short, long, tmp_path):
    found = GGUF(file_of(tmp_path / "one.gguf", **file)).frequencies()
    want = {SHORT: short} | ({} if long is None else {LONG: long})
    assert found.keys() == want.keys()
    for kind, options in want.items():
        angles = (found[kind].inverse * POSITION).tolist()
        assert angles == pytest.approx(engines_angles(**options), rel=1e-6)


def test_factors_of_another_number_of_pairs_are_refused(tmp_path):
    with refused("rope_freqs.weight", str(len(SOME) + 1)):
        GGUF(file_of(tmp_path / "one.gguf", tensors={"rope_freqs": [*SOME, 2.0]})).frequencies()


def test_factors_that_are_not_known_to_be_read_are_named_and_not_judged(tmp_path):
    file = GGUF(file_of(tmp_path / "one.gguf", architecture="qwen2", tensors=FREQS))
    assert file.frequencies() == {} and "rope_freqs.weight" in file.facts()["factors of frequencies"]


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        (FOUR, FACTOR),
        (FOUR | {"scaling__attn_factor": 0.5}, FACTOR / 2),
        (FOUR | {"scaling__yarn_attn_factor": 0.5}, FACTOR),  # overwritten
        (FOUR | {"scaling__factor": 0.5}, 1.0),  # the engine's grows from 1 on
        ({"architecture": "mistral3", "scaling__yarn_log_multiplier": 1.0} | FOUR, 1.0),
        ({TYPE: "longrope", "scaling__attn_factor": 1.25}, 1.25),
    ],
)
def test_the_factor_of_cos_and_sin(keys, factor, tmp_path):
    assert GGUF(file_of(tmp_path / "one.gguf", **keys)).facts()["attention factor"] == pytest.approx(factor)


def test_the_base_of_windows_is_compared(tmp_path):
    """Gemma 3's local layers: 10000 in llama.cpp, where the file has none."""
    by_type = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    for base, found in ((1e4, {}), (2e4, {"base of windows": (2e4, 1e4)})):
        folder = tmp_path / f"{base}"
        rope = by_type | {"sliding_attention": {"rope_type": "default", "rope_theta": base}}
        by_layer(Gemma3ForCausalLM, rope_parameters=rope, sliding_window=8, head_dim=8).save_pretrained(folder)
        file = written(folder, folder / "one.gguf", architecture="gemma3", permuted=False, sliding_window=8)
        assert {name: one for name, one in wrong(against(folder, file)).items() if name == "base of windows"} == found


def test_a_copy_in_half_precision_has_the_same_weights(checkpoint, tmp_path):
    load(checkpoint, tokenizer=False).model.bfloat16().save_pretrained(tmp_path / "half")
    assert wrong(against(checkpoint, tmp_path / "half")) == {}


def test_a_second_checkpoint(checkpoint, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    assert wrong(against(checkpoint, other)) == {}
    edit_config(other, max_position_embeddings=4 * LENGTH)
    assert wrong(against(checkpoint, other)) == {"declared length": (LENGTH, 4 * LENGTH)}
    model = llama(rope=YARN | {"rope_theta": 5e5})
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj")):
            module.weight.data = convert_layout(module.weight.data, DIM, "interleaved")
    model.save_pretrained(tmp_path / "interleaved")
    found = wrong(against(checkpoint, tmp_path / "interleaved"))
    assert found == {"queries and keys": ("expected the same", REORDERED)}


def test_the_command(checkpoint, tmp_path, command):
    right, other = (written(checkpoint, tmp_path / f"{base}.gguf", rope_freq_base=base) for base in (5e5, 1e4))
    code, printed, error = command("check", checkpoint, "--against", right)
    assert (code, error) == (0, "") and "nothing contradicts" in printed
    code, printed, _ = command("check", checkpoint, "--against", other, "--json")
    assert code == 1 and json.loads(printed)["differ"] == ["base", "frequencies"]
    other.write_bytes(other.read_bytes()[:40])
    code, _, line = command("check", checkpoint, "--against", other)
    assert code == 2 and "cut off" in line and line.count("\n") == 1
    (tmp_path / "adapter_config.json").write_text("{}")
    wrong_use = ((checkpoint, "--against", right, "--length", 20), ("alibi", "--against", right))
    for arguments in (*wrong_use, (checkpoint, "--against", tmp_path)):
        assert command("check", *arguments)[0] == 2


def text_of(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


@pytest.mark.parametrize(
    "key",
    [b"".join((bytes([9, 0, 0, 0, kind, 0, 0, 0]), (2**40).to_bytes(8, "little"))) for kind in (0, 4, 8, 9, 12)]
    + [bytes([8, 0, 0, 0]) + (2**62).to_bytes(8, "little"), bytes([99, 0, 0, 0])]
    + [bytes([9, 0, 0, 0]) + (bytes([9, 0, 0, 0, 1]) + bytes(7)) * 9000],
)
def test_sizes_in_a_file_are_not_believed(key, tmp_path) -> None:
    """A list of 2^40 values in a file of 60 bytes would be read one by one, until the memory ends."""
    header = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    (file := tmp_path / "a.gguf").write_bytes(header + text_of(b"general.architecture") + key)
    with pytest.raises(ValueError, match=r"a\.gguf: no GGUF file"):
        GGUF(file)
    if key[0] == 9 and len(key) == 16:  # as many bytes behind it as would take a minute to read one by one
        file.write_bytes(header + text_of(b"general.architecture") + key + bytes(5_000_000))
        with pytest.raises(ValueError, match=f"a list of {2**40} values"):
            GGUF(file)
    file.write_bytes(header[:8] + (2**40).to_bytes(8, "little") + bytes(8))
    with pytest.raises(ValueError, match=r"a\.gguf: no GGUF file"):
        GGUF(file)
