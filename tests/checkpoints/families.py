"""Every causal family of the installed transformers at toy size: how it rotates, measured, against what is read of its config.

The measuring looks into no config and knows no family: attention is replaced by a recorder, and queries and keys at several
positions, and without rotation, give the angle by which each pair turns.
"""

import copy
import gc
from collections.abc import Iterable
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longitude.checkpoints.compare import LayerRope, read
from longitude.checkpoints.declared import class_of, text_part
from longitude.checkpoints.observed import skeleton
from longitude.positions.hugging_face import NotUnderstood
from longitude.positions.scaling import rope_frequencies
from longitude.positions.scaling.base import Follows
from make_families import OPTIONS, OWN, SHAPE
from tests.checkpoints.published import PUBLISHED, RELEASED

FAMILIES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {"longitude"})
NAME = "longitude_sweep"
EQUAL = 1e-6
"""Relative: transformers makes its tables in float32."""
ROUNDED = 3e-4
"""Relative: of the lengths of queries, in families that rotate them in float32, or norm them behind the rotation."""
FAR = (32, 1024, 32768)
"""Positions by which angles are refined."""
MOST = 6e7
"""Numbers of a toy."""
DECLARED, ORIGINAL = 256, "original_max_position_embeddings"
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
KEPT = {"rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta"}
"""Keys of rope parameters that a scheme leaves as they are."""
SCHEMES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64},
    "yarn, equal betas": {
        "rope_type": "yarn", "factor": 4.0, ORIGINAL: 64, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0
    },
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 64},
    "longrope": {"rope_type": "longrope", "factor": 4.0, ORIGINAL: 64},
    "half": {"partial_rotary_factor": 0.5},
}  # fmt: skip


# ---- toys ------------------------------------------------------------------------------------------------------------
BLT = dict.fromkeys(("hidden_size", "hidden_size_global", "intermediate_size"), 64)
BLT |= {"num_attention_heads": 4, "num_hidden_layers": 1}
MORE: dict[str, dict[str, Any]] = {
    "blt": {f"{part}_config": BLT for part in ("patcher", "encoder", "decoder", "global")}
    | {"encoder_hash_byte_group_vocab": 96},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "rope_parameters": {"full_attention": None, "sliding_attention": PLAIN},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 96},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "crop_size": 28,
        },
        "audio_config": {
            "hidden_size": 32, "intermediate_size": 32, "num_blocks": 2, "num_attention_heads": 2, "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32,
        },
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
    },
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 3},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True},
}  # fmt: skip
"""Options of families that the page of laws does not try."""


def toy_config(family: str, scheme: str = "default") -> Any:
    """A config of a family, small in every way that it has, with a scheme in its rope parameters, of each layer type."""
    kind = transformers.CONFIG_MAPPING[family]
    with suppress(Exception):  # a class that does not take its own defaults is one of text alone
        kind = type(kind().get_text_config(decoder=True))
    more = OWN.get(kind.model_type, {}) | MORE.get(kind.model_type, {})
    has = {*vars(kind()), *kind.attribute_map}
    options = (
        SHAPE | {"max_position_embeddings": DECLARED} | {key: value for key, value in OPTIONS.items() if key in has}
    )
    options = {key: value for key, value in (options | more).items() if value is not None}
    config = kind(**copy.deepcopy(options))
    if scheme == "default" or not getattr(config, "rope_parameters", None):
        return config
    return kind(**copy.deepcopy(options | {"rope_parameters": with_scheme(config, SCHEMES[scheme])}))


def with_scheme(config: Any, scheme: dict[str, Any]) -> dict[str, Any]:
    """Rope parameters of a config with a scheme in each dict of them."""
    parameters = copy.deepcopy(config.rope_parameters)
    for inner in [entry for entry in parameters.values() if isinstance(entry, dict)] or [parameters]:
        for key in inner.keys() - KEPT - ({ORIGINAL} if "llama_4_scaling_beta" in inner else set()):
            del inner[key]
        inner |= scheme
        if inner.get("rope_type") == "longrope":
            pairs = next(len(rotation.frequencies) for rotation in measured(config) if rotation is not None)
            inner |= {"short_factor": [1 + k / 8 for k in range(pairs)], "long_factor": [1.5**k for k in range(pairs)]}
    return parameters


def toy(config: Any) -> Any:
    """A random model of it, in float64. Unseen for one that is no toy."""
    torch.manual_seed(0)
    with torch.device("meta"):
        numbers = sum(x.numel() for x in skeleton(copy.deepcopy(config)).state_dict().values())
    if numbers > MOST:
        raise Unseen(f"{numbers:.1e} numbers are no toy")
    model = skeleton(copy.deepcopy(config)).double()
    with torch.no_grad():
        for weight in model.parameters():
            if not weight.any():  # a learned scale that begins at zero hides what it multiplies (Zaya)
                weight.uniform_(-0.5, 0.5)
    with suppress(ValueError, AttributeError):
        model.set_experts_implementation("eager")
    with suppress(ValueError, AttributeError):
        model.set_attn_implementation("sdpa")  # Falcon calls it itself
    with suppress(ValueError, AttributeError):
        model.set_attn_implementation(NAME)
    for module in model.modules():
        if type(module).__module__.startswith("transformers."):
            without_kernels(module)
    return model


def without_kernels(module: Any) -> None:
    """Zeros stand for a recurrence whose kernels need a GPU."""
    forward = module.forward

    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return forward(*arguments, **named)
        except RuntimeError as error:
            if "active drivers" not in str(error):
                raise
            return torch.zeros_like(arguments[0] if arguments else named["hidden_states"])

    module.forward = call


# ---- measuring -------------------------------------------------------------------------------------------------------
class Unseen(Exception):
    """Queries and keys do not show."""


class Measured(NamedTuple):
    """How a layer rotates: the angle of each pair from one position to the next, and what multiplies cos and sin.

    slack: radians that the angles may be wrong by, where queries are rotated in float32.
    of_tables: what multiplies the model's tables, where a norm behind the rotation takes it away again.
    """

    frequencies: Tensor
    factor: float
    slack: float = 0.0
    of_tables: tuple[float, ...] = ()


_SEEN: list[tuple[Any, Tensor, Tensor]] = []


def _record(module: Any, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **named: Any) -> Any:
    _SEEN.append((module, query.detach().double(), key.detach().double()))
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


class InPlaceOfTorch(TorchFunctionMode):
    """The recorder in the place of torch's attention, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _record(None, *args[:3])[0].transpose(1, 2)
        if func is torch.baddbmm and "alpha" in (kwargs or {}):  # GPT-NeoX Japanese multiplies queries by keys itself
            _record(None, args[1][:, None], args[2].mT[:, None], args[2].mT[:, None])
        return func(*args, **(kwargs or {}))


ALL_ATTENTION_FUNCTIONS.register(NAME, _record)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)


@contextmanager
def tables(model: Any, change: Any) -> Any:
    """change: of cos and sin that a rotary module made."""

    def hook(module: Any, arguments: Any, out: Any) -> Any:
        if isinstance(out, Tensor):
            return torch.complex(*change(out.real, out.imag))
        return change(*out)

    hooks = [m.register_forward_hook(hook) for m in model.modules() if "rotary" in type(m).__name__.lower()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def queries_and_keys(model: Any, *positions: int) -> list[tuple[Tensor, Tensor]]:
    """Of each layer with attention in its order, at the first of the positions: [rows and heads, head_dim] each."""
    _SEEN.clear()
    ids = torch.arange(3, 6)[:, None].expand(3, len(positions))
    try:
        with torch.no_grad(), InPlaceOfTorch():
            model(input_ids=ids, position_ids=torch.tensor(positions).expand(3, -1), use_cache=False)
    except (TypeError, IndexError, RuntimeError, ValueError) as error:
        raise Unseen(" ".join(str(error).split())[:160]) from error
    layers: dict[Any, tuple[Tensor, Tensor]] = {}
    for n, (module, query, key) in enumerate(_SEEN):  # some layers call attention more than once
        at = getattr(module, "layer_idx", None)
        layers.setdefault(n if at is None or at < 0 else (at, module), (query, key))
    return [(query[:, :, 0].flatten(0, 1), key[:, :, 0].flatten(0, 1)) for query, key in layers.values()]


def measured(config: Any, length: int = 0) -> list[Measured | None]:
    """How each attention rotates queries and keys; None where it does not. length: of the sequence, where tables follow it."""
    model, factors = toy(config), set[float]()

    def noted(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        factors.add(float(torch.hypot(cos.double(), sin.double()).max()))
        return cos, sin

    positions = [(at, max(length - 1, at)) for at in (0, 1, *(() if length else FAR))]
    with tables(model, noted):
        after = [queries_and_keys(model, *places) for places in positions]
    if not after[0]:
        raise Unseen("its attention is its own")
    with tables(model, lambda cos, sin: (torch.ones_like(cos), torch.zeros_like(sin))):
        before = [queries_and_keys(model, *places) for places in positions]
    rotations = []
    for layer in range(len(after[0])):
        queries, keys = (turned([x[layer][n] for x in before], [x[layer][n] for x in after]) for n in (0, 1))
        if (queries is None) != (keys is None):
            raise Unseen("queries and keys are not rotated alike")
        if queries is not None and keys is not None:
            torch.testing.assert_close(
                queries.frequencies, keys.frequencies, atol=queries.slack + keys.slack, rtol=EQUAL
            )
            if abs(queries.factor - 1) < 1e-3:
                queries = queries._replace(of_tables=tuple(factors))
        rotations.append(queries)
    del model, before, after
    gc.collect()  # of modules whose forward was replaced, which hold themselves
    return rotations


def turned(before: list[Tensor], after: list[Tensor]) -> Measured | None:
    """The rotation that makes one of the other, [samples, head_dim] at positions 0, 1 and those of FAR; None where nothing turns.

    Which numbers are pairs is tried: in a rotation all samples turn by the same angles. Some families rotate in float32, so the
    angle from one position to the next is refined by those over many.
    """
    changed = ((after[1] * before[0] - after[0] * before[1]).abs() > 1e-13).any(0).nonzero().flatten().tolist()
    if not changed:
        return None
    width, first, last = after[0].shape[-1], changed[0], changed[-1] + 1
    candidates = []
    for start, end, halves in product({0, first, first - first % 2}, {width, last, last + last % 2}, (True, False)):
        if (end - start) % 2 == 0:
            pairs = [tuple(as_pairs(x[:, start:end], halves) for x in both) for both in zip(before, after, strict=True)]
            angle, off = between(*pairs[1])
            candidates.append((off > ROUNDED, end - start, off, angle, pairs))
    wrong, _, off, angle, pairs = min(candidates, key=lambda candidate: candidate[:2])
    if wrong:
        raise Unseen(f"no pairs of its queries turn alike (by {off:.1e})")
    for distance, both in zip(FAR, pairs[2:]):
        over, _ = between(*both)
        angle = (over + 2 * torch.pi * ((angle * distance - over) / (2 * torch.pi)).round()) / distance
    factor = (pairs[0][1].abs().square().sum() / pairs[0][0].abs().square().sum()).sqrt()
    slack = 0.0 if off < 1e-8 else 1e-11 if len(pairs) > 2 else 3e-7
    return Measured(angle.abs(), float(factor), slack) if float(angle.abs().max()) > ROUNDED else None


def between(before: Tensor, after: Tensor) -> tuple[Tensor, float]:
    """(angle of each pair from [samples, pairs] to another, how far they are from all turning by it)."""
    both = (after * before.conj()).sum(0)
    scale = both.abs().sum() / before.abs().square().sum()  # a temperature of queries
    expected = before * scale * torch.polar(torch.ones_like(both.abs()), both.angle())
    return both.angle(), float((after - expected).abs().max() / before.abs().square().mean().sqrt())


def as_pairs(x: Tensor, halves: bool) -> Tensor:
    """[samples, width] -> complex [samples, width/2]."""
    x = x.unflatten(-1, (2, -1)).transpose(-1, -2) if halves else x.unflatten(-1, (-1, 2))
    return torch.view_as_complex(x.contiguous())


def dependences(config: Any, tokens: int) -> dict[int, Tensor]:
    """[tokens, tokens] of each attention, by its layer_idx: whether its output at one token depends on what another holds."""
    torch.manual_seed(0)
    model, calls = skeleton(copy.deepcopy(class_of(config))).double(), {}
    with suppress(ValueError, AttributeError):
        model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    for weight in model.parameters():  # so small that no softmax gives a key nothing
        torch.nn.init.normal_(weight, std=0.1)

    def called(module: Any, arguments: Any, named: Any, out: Any) -> None:
        if "attention" in type(module).__name__.lower() and hasattr(module, "layer_idx"):
            calls.setdefault(module.layer_idx, (module, arguments, named))

    hooks = [module.register_forward_hook(called, with_kwargs=True) for module in model.modules()]
    with torch.no_grad():
        model(input_ids=torch.randint(3, 90, (1, tokens)), use_cache=False)
        for handle in hooks:
            handle.remove()
        return {at: dependence(*call) for at, call in calls.items()}


def dependence(module: Any, arguments: Any, named: Any) -> Tensor:
    """Of one attention, called again with one token changed after another."""
    x = arguments[0] if arguments else named["hidden_states"]

    def output(x: Tensor) -> Tensor:
        out = module(x, *arguments[1:], **named) if arguments else module(**{**named, "hidden_states": x})
        return (out if isinstance(out, Tensor) else out[0]).reshape(x.shape[1], -1)

    changed = [x + torch.randn_like(x) * (torch.arange(x.shape[1]) == at)[:, None] for at in range(x.shape[1])]
    return torch.stack([(output(variant) - output(x)).abs().amax(-1) > 1e-12 for variant in changed], 1)


# ---- against what is read --------------------------------------------------------------------------------------------
def apart(reading: LayerRope | None, rotation: Measured | None, length: int) -> str | None:
    """How what is read of a layer differs from what was measured."""
    if reading is None or rotation is None:
        return (
            None if reading is None and rotation is None else f"it is {'not ' * (reading is None)}rotated as it is read"
        )
    options = reading.rope.options(reading.head_dim)
    options = {key: option for key, option in options.items() if key not in ("sections", "arrangement")}
    want = rope_frequencies(reading.head_dim, **options, length=length or None)
    pairs = max(len(want.inverse), len(rotation.frequencies))
    ours, theirs = (
        torch.nn.functional.pad(x.double(), (0, pairs - len(x))) for x in (want.inverse, rotation.frequencies)
    )
    off = ((theirs - ours).abs() - rotation.slack).clamp(min=0) / ours.where(ours > 0, 1)
    if off.max() > EQUAL:
        return f"frequencies are {float(off.max()):.1e} apart"
    if any(abs(factor / want.attention_factor - 1) <= EQUAL for factor in (rotation.factor, *rotation.of_tables)):
        return None
    return f"read factor {want.attention_factor:.7g}, measured {rotation.factor:.7g}"


def compared(config: Any, small: Any = None) -> tuple[str, str]:
    """("equal", ""), ("refused", why, with its keys), ("unknown", why) or ("unequal", where). small: what is measured."""
    try:
        reading = read(config)
    except NotUnderstood as error:
        return "refused", f"{', '.join(error.keys)}: {error}"
    except ValueError as error:
        return "refused", str(error)
    if reading.layers is None or reading.attends is None:
        return "unknown", "; ".join(reading.notes)
    scalings = [layer.rope.scaling for layer in reading.layers if layer is not None]
    borders = {scaling.original_max_length for scaling in scalings if isinstance(scaling, Follows)}
    attending, problems = [n for n, yes in enumerate(reading.attends) if yes], reading.problems()
    for length in (2, *(2 * border for border in borders)) if borders else (0,):
        try:
            rotations = measured(class_of(config) if small is None else small, length)
        except Unseen as error:
            return (
                ("unknown", "; ".join(problems) or f"not measured: {error}") if attending or problems else ("equal", "")
            )
        if len(rotations) != len(attending):  # one list of layers gone through again and again (HRM) is asked once
            layers = [reading.layers[n] for n in attending]
            if any(layer != layers[0] for layer in layers):
                return "unknown", f"not measured: {len(rotations)} attentions were seen, in {len(attending)} layers"
            rotations = (rotations * len(attending))[: len(attending)]
        for layer, rotation in zip(attending, rotations, strict=True):
            if (difference := apart(reading.layers[layer], rotation, length)) and not (length > 2 and reading.notes):
                return "unequal", f"layer {layer}: {difference}, at length {length}"
    return ("unknown", "; ".join(problems)) if problems else ("equal", "")


def swept(family: str, schemes: Iterable[str] | None = None) -> dict[str, tuple[str, str]]:
    """By scheme; all by default."""
    results: dict[str, tuple[str, str]] = {}
    for scheme in schemes or SCHEMES:
        try:
            config = toy_config(family, scheme)
        except (Unseen, StopIteration) as error:
            results[scheme] = "unknown", f"no lists of factors as long as its pairs ({error})"
            continue
        except Exception as error:
            results[scheme] = "refused", f"by its class: {' '.join(str(error).split())[:160]}"
            continue
        if scheme != "default" and not getattr(config, "rope_parameters", None):
            break
        results[scheme] = compared(config)
    return results


# ---- published configs -----------------------------------------------------------------------------------------------
SMALL = {
    "vocab_size": 96, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "vocab_size_per_layer_input": 96, "shared_expert_intermediate_size": 32, "index_n_heads": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_heads": 2, "linear_head_dim": 16, "o_lora_rank": 16, "n_shared_experts": 1,
}  # fmt: skip
POSITION = """
    head_dim sliding_window qk_rope_head_dim index_head_dim attention_hidden_size num_layers n_layers n_layer max_seq_len
    n_positions
""".split()


def small(raw: dict[str, Any]) -> Any:
    """The class's config of a published one, with its layers and its rotated widths, and everything else as small as a toy."""
    theirs, written = class_of(raw), dict(text_part(raw))
    has, heads = {*theirs.to_dict(), *type(theirs).attribute_map}, written.get("num_attention_heads")
    more = {key: value for key, value in {**OPTIONS, **SMALL}.items() if key in has and key not in POSITION}
    if heads and written.get("head_dim") is None and read(raw).ropes:  # then their width is that of the model over them
        more["hidden_size"] = 2 * (written["hidden_size"] // heads)
    if "num_key_value_heads" in has:
        more["num_key_value_heads"] = (
            2 if "kv_lora_rank" in has or written.get("num_key_value_heads") in (None, heads) else 1
        )
    if "mamba_d_head" in has:
        more |= {"mamba_n_heads": 4, "mamba_d_head": more["hidden_size"] // 2, "mamba_d_ssm": 2 * more["hidden_size"]}
    return type(theirs)(**{key: value for key, value in (written | more).items() if key != "model_type"})


def of_published(name: str) -> tuple[str, str]:
    """Read at its real size, as a dict of its file; measured in a toy of its class with its layers and its widths."""
    raw = (PUBLISHED | RELEASED)[name]
    try:
        toy_of_it = None if class_of(raw) is None else small(raw)
    except ValueError:  # then reading it is refused, too
        toy_of_it = None
    return compared(raw, toy_of_it)
