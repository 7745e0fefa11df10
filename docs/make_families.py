"""The page of families, docs/families.md: what `longitude check` says of each causal architecture of transformers, at toy size.

python docs/make_families.py                     # all: about twelve minutes of processor time; writes the page and families.csv
python docs/make_families.py llama gemma3_text   # these alone, printed

A law that fails stands on the page only if EXPLAINED says what the class does, and a test shows it in unmodified transformers.
"""

import re
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.integrations import hub_kernels
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longitude.check import check
from longitude.check.run import laws
from longitude.checkpoints.compare import read
from longitude.checkpoints.declared import declared_length
from longitude.checkpoints.positions import has_alibi, last_position
from longitude.extend import extend
from longitude.testing.engine import Result

if not torch.cuda.is_available():  # kernels of flash-linear-attention need a GPU; exporting takes torch's own path
    hub_kernels.is_torchdynamo_exporting = lambda: True
PAGE = Path(__file__).with_name("families.md")
MATRIX = PAGE.with_suffix(".csv")
SKIPPED = {
    "blt": "A second model groups the bytes: {}.",
    "emu3 fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant git got_ocr2 llama4 mllama "
    "moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal dots3_note qwen3_5 qwen3_5_moe qwen4_exp": "Models of text "
    "with images or sound: {}. Their text model is another row, or is not causal by itself.",
}  # fmt: skip
"""Causal models of transformers that are not tried, and why."""
IMAGES = (
    "glm5_next", "mistral_large4", "muse_glimmer", "muse_spark", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe",
    "step3p7",
)  # fmt: skip
"""Models of text and images: those whose positions have several axes, and those whose text model is no causal one by itself."""
FAMILIES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *IMAGES} - {name for names in SKIPPED for name in names.split()})
SHAPE = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OPTIONS = {
    "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "moe_intermediate_size": 32, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "state_size": 8, "attention_hidden_size": 64, "lru_width": 64, "attention_window_size": 16,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_d_ssm": 64, "n_groups": 1,
    "d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 64, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4,
    "num_layers": 4, "num_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 64, "attention_heads": 4, "decoder_layers": 2,
    "encoder_layers": 2, "decoder_attention_heads": 4, "encoder_attention_heads": 4, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64,
    "index_n_heads": 4, "index_head_dim": 16, "index_topk": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_head_dim": 16, "linear_num_heads": 4, "chunk_size": 8,
    "shared_expert_intermediate_size": 32, "n_shared_experts": 1, "swa_head_dim": 16, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2, "rel_extent": 16, "d_rel": 4, "is_decoder": True, "max_target_positions": 64,
    "causal": True, "unpadded_vocab_size": 96,
}  # fmt: skip
"""Of those families that have them."""
UNSET = {"max_position_embeddings": None}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LATENT = {"head_dim": 8, "num_key_value_heads": 4}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys("apertus apertus1p5_text cwm gpt_oss ministral3 recurrent_gemma xlnet".split(), UNSET),
    **dict.fromkeys(
        "axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa longcat_flash minicpm3 "
        "sarvam_mla youtu".split(),
        LATENT,
    ),
    "bamba": {"attn_layer_indices": [2, 5]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**PLAIN}}},
    "cpmant": {"dim_head": 16, "dim_ff": 64, "prompt_length": 4},
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64},
    },
    "dory": {"n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2},
    "dots3_note_text": LATENT | {
        "per_layer_config": {}, "head_dim": 32, "qk_nope_head_dim": 24, "num_hidden_layers": 4,
        "shared_experts_intermediate_size": 32,
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3, "laurel_rank": 8,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "activation_sparsity_pattern": [0.0] * 6,
    },
    "gemma4_text": {"global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
    "gpt_neo": {"num_hidden_layers": None, "num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 3, "position_embedding_type": "rope"},
    "kimi_linear": LATENT | {"layer_types": ["linear_attention", "full_attention"] * 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "mimo_v2_flash": {"head_dim": 24},
    "minimax": {"sliding_window": None},
    "prophetnet": {
        "num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4,
    },
    "reformer": {
        "num_hidden_layers": None, "attn_layers": ["local", "lsh"], "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 48],
        "attention_head_size": 16, "hash_seed": 0, "feed_forward_size": 64, "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "roc_bert": {"pronunciation_vocab_size": 96, "shape_vocab_size": 96},
    "xlstm": {"hidden_size": 128},  # its cache is of multiples of 64
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 12, "attention_head_dim": 32, "mamba_dt_rank": 4, "attention_hidden_size": 128},
    "zamba2": {
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2, "hybrid_layer_ids": None,
        "n_mamba_heads": 8, "mamba_headdim": 16, "attention_head_dim": 32, "kv_channels": 16, "adapter_rank": 4,
        "use_mem_rope": True, "attention_hidden_size": 128, "num_query_groups": None, "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
VISION = {
    "depth": 1, "hidden_size": 32, "embed_dim": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 2, "head_dim": 16,
    "spatial_merge_size": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    "window_size": 8, "fullatt_block_indexes": [0], "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "projection_intermediate_size": 32, "num_key_value_heads": 2,
}  # fmt: skip
"""Of families with images; their text model has the shape of the others."""
AUDIO = {"out_hidden_size": 64, "hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1]}
MROPE = {"rope_parameters": PLAIN | {"mrope_section": [2, 3, 3]}}
INTERLEAVED = {"rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}}
OWN_TEXT: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), MROPE),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), INTERLEAVED),
    "mistral_large4": LATENT | UNSET,
    "muse_spark": {"moe_hidden_size": 32},
    "step3p7": {"sliding_window": 8},
    "glm5_next": {
        "num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": None, "index_kpool": 4,
        "layer_types": ["linear_attention", "indexed_attention"] * 3,
    },
}  # fmt: skip


def toy(family: str, **changes: Any) -> Any:
    """A random model of a family, small in every way that its config has; changes: options of its text model."""
    default = AutoConfig.for_model(family)
    torch.manual_seed(0)
    if family not in IMAGES:
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **shape_of(default, OWN.get(family, {})) | changes)
        ).eval()
    text = shape_of(default.text_config, OWN_TEXT.get(family, {})) | changes
    vision = {key: value for key, value in VISION.items() if key in default.vision_config.to_dict()}
    vision |= {"hidden_size": 64} if family == "qwen2_vl" else {}  # what others call out_hidden_size
    audio = {} if getattr(default, "audio_config", None) is None else {"audio_config": AUDIO}
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, **audio, **TOKENS)
    return AutoModelForImageTextToText.from_config(config).eval()


def shape_of(default: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """The options of a small config, of those that a default one has."""
    has = {*default.to_dict(), *type(default).attribute_map}
    options = SHAPE | {key: value for key, value in OPTIONS.items() if key in has} | changes
    if getattr(default, "sliding_window", None) is None and "sliding_window" not in changes:  # its class may read none
        options.pop("sliding_window", None)
    return {key: value for key, value in options.items() if value is not None}


EXPLAINED = {
    "left_padding": {
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart trocr whisper": "forward takes no "
        "position_ids, and counts positions from the padding",
        "deepseek_v4": "keys are compressed in windows that are counted from the first token of a row, padding or not",
        "xlm": "with causal = True attention sees padding as it sees any token",
        "recurrent_gemma": "recurrent layers do not read attention_mask, and take up padding as any token",
        "rwkv": "attention_mask is not read, so the state takes up padding as any token",
    },
    "cached_decoding": {
        "bamba": "positions that the model counts itself begin at 0 behind a cache: pass position_ids",
        "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod": "positions begin at padding_idx "
        "+ 1, and generate() gives some that begin at 0",
        "prophetnet": "logits of a token depend on how many tokens follow it",
    },
    "chunked_prefill": {"falcon_mamba jamba mamba": "a second chunk does not begin with the state that the first one left"},
    "cached_keys": {
        "inkling2_loop_text inkling2_text inkling_text": "a static cache with windows says that it can be cropped, and has "
        "overwritten what it would need",
    },
    "layer_masks": {"moshi": "sliding_window is not applied: its mask is the causal one"},
    "image_positions": {
        "qwen2_5_vl qwen2_vl": "text after a video begins one above the largest row or column, where the published rule takes "
        "the time as well",
    },
}  # fmt: skip
"""Law -> families that break it, and what their classes do; each is shown in unmodified transformers by a test."""


CHANGED: dict[str, dict[str, Any]] = {
    "beam": {"rope_parameters": {kind: {**PLAIN} for kind in ("full_attention", "sliding_attention")}},
    "cohere2_moe": {"first_k_dense_replace": 1}, "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 6},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"] * 3},
    "mistral": {"sliding_window": None}, "phi3": {"original_max_position_embeddings": 64},
    "muse_glimmer": {"layer_rope_theta": [1e4] * 6}, "muse_spark": {"layer_rope_theta": [5e5] * 6},
}  # fmt: skip
"""Options with which layers without a window rotate, for classes that have them, and a training length as short as a toy's."""
REFUSED = {
    "neither rotary": "no positions that can be extended",
    "learned table of positions": "a learned table of positions",
    "ALiBi biases": "ALiBi",
    "formula that its configuration": "a rotation that config.json does not describe",
    "frequencies among its weights": "frequencies that are weights",
    "rotates nothing in layers that see more": "no rotation in layers of full attention",
    "raise the window": "a window in every layer of attention",
}
"""Part of a refusal of `extend` -> the reason of the class in the matrix and on the page."""


def explained() -> dict[tuple[str, str], str]:
    """(family, law) -> what the class does."""
    return {
        (family, law): reason
        for law, families in EXPLAINED.items()
        for names, reason in families.items()
        for family in names.split()
    }


class Positions(NamedTuple):
    """What `show` reads of a family's positions, and what `extend` makes of a checkpoint."""

    read: str
    extended: str


def read_as(model: Any) -> str:
    """What is read of the positions of a model's config, confirmed by its class."""
    with suppress(ValueError):
        reading = read(model.config)
        if not reading.problems():
            return "rotary" if reading.ropes else "no rotation"
    if has_alibi(model.config):
        return "ALiBi"
    return "not understood" if last_position(model) is None else "learned table"


def extended(family: str) -> str:
    """Result of `extend` to four times the length: "written", by the first method that fits, or the reason of the class."""
    changes, reasons = CHANGED.get(family, {}), []
    model = toy(family, **changes)
    for method in ("yarn", "linear", "ntk"):
        if (reason := refusal(model, method)) is None:
            return "written" + f" by {method}" * (method != "yarn") + f" with {' and '.join(changes)}" * bool(changes)
        reasons.append(reason)
    return next(text for sign, text in REFUSED.items() if sign in reasons[0])


def refusal(model: Any, method: str, original: int | None = None) -> str | None:
    """Why `extend` does not write it; None if it does. A scheme that its default config has is replaced."""
    length = declared_length(model.config.get_text_config(decoder=True))
    with TemporaryDirectory() as folder:
        source, out = Path(folder) / "model", Path(folder) / "longer"
        model.save_pretrained(source)
        try:
            before = original or (None if length else 64)
            extend(source, out, to=4 * (length or 64), method=method, original=before, text=None)
        except ValueError as error:
            known = re.search(r"pass --original (\d+)", str(error))
            return refusal(model, method, int(known[1])) if known else str(error)
    return None


def page(results_of: dict[str, dict[str, Result]], positions: dict[str, Positions]) -> str:
    """A table of what fails, what is not tried, and how many are read and extended."""
    broken = failed(results_of)
    failing = {family for family, _ in broken}
    lines = [
        "# Families",
        "",
        f"Look up whether a model class of transformers {transformers.__version__} has a position bug. We ran `longitude check` "
        f"on {len(results_of)} architectures with small random weights: {len(results_of) - len(failing)} pass, "
        f"{len(failing)} have the defects below. For your own model:",
        "",
        *("```bash", "longitude check my-model --quick    # its class with small random weights: seconds", "```"),
        "",
        "## What fails",
        "",
        "| family | law | measured | threshold | what the class does |",
        "| --- | --- | --- | --- | --- |",
    ]
    for family, result in broken:
        measured = "raises" if result.measured is None else f"{result.measured:.2g}"
        reason = explained().get((family, result.law), result.reason)
        lines.append(f"| `{family}` | `{result.law}` | {measured} | {result.threshold:.2g} | {reason} |")
    chosen = [family for family, results in results_of.items() if "equal scores" in results["cached_decoding"].reason]
    lines += [
        "",
        "[families.csv](families.csv) has what each law measured for every family. `tests/docs/test_families.py` shows each "
        "defect in transformers alone. `python docs/make_families.py` makes both files again, in twelve minutes.",
        "",
        "## Sparse attention",
        "",
        f"{', '.join(f'`{family}`' for family in chosen)} choose keys by top-k, and many of their scores are equal. Which of "
        "equal keys torch takes depends on the number of keys, so a decoded token may get others than in a full forward pass. "
        "`check` takes the first of equal scores in both: then decoding equals the full forward pass, with as many keys as the "
        "config says and with all keys.",
        "",
        "## Not tried",
        "",
        *("* " + reason.format(", ".join(f"`{name}`" for name in names.split())) for names, reason in SKIPPED.items()),
    ]
    return "\n".join([*lines, *of_positions(positions)]) + "\n"


def of_positions(positions: dict[str, Positions]) -> list[str]:
    """The section of what is read and extended."""
    unread = [f"`{family}`" for family, position in positions.items() if position.read == "not understood"]
    results = [position.extended for position in positions.values()]
    names = {what: [f"`{family}`" for family, of in positions.items() if of.extended == what] for what in results}
    written = sum(what.startswith("written") for what in results)
    return [
        "",
        "## Read and extended",
        "",
        f"`longitude show` reads the positions of {len(positions) - len(unread)} of {len(positions)} architectures as their "
        f"classes compute them. For the others it prints what it does not understand: {', '.join(unread)}.",
        "",
        f"`longitude extend` writes a checkpoint, four times as long, for {written}. The method is `yarn` unless a row names "
        "another. *With* names options that differ from the defaults of the class.",
        "",
        "| result, or reason of the class | number | architectures |",
        "| --- | ---: | --- |",
        *(
            f"| {what} | {len(of)} | {', '.join(of) if len(of) < 30 else '[families.csv](families.csv)'} |"
            for what, of in sorted(names.items(), key=lambda item: (not item[0].startswith("written"), -len(item[1])))
        ),
    ]


def matrix(results_of: dict[str, dict[str, Result]], positions: dict[str, Positions]) -> str:
    """A row for each family: read and extended, and what each law measured, "-" if it does not apply."""
    rows = [["family", "read", "extended", *laws()]]
    for family, results in results_of.items():
        rows.append([family, *positions[family], *(cell(results[law]) for law in laws())])
    return "".join(",".join(row) + "\n" for row in rows)


def cell(result: Result) -> str:
    measured = result.status if result.measured is None else f"{result.measured:.2g}"
    return "-" if result.status == "not applicable" else measured + "!" * (result.status == "failed")


def failed(results_of: dict[str, dict[str, Result]]) -> list[tuple[str, Result]]:
    """(family, result) of every law that is broken."""
    every = [(family, result) for family, results in results_of.items() for result in results.values()]
    return [(family, result) for family, result in every if result.status == "failed"]


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results_of, positions = {}, {}
    for family in sys.argv[1:] or FAMILIES:
        results_of[family] = check(toy(family))
        positions[family] = Positions(read_as(toy(family)), extended(family))
        print(f"{family}: {positions[family]}")
        for result in results_of[family].values():
            if result.status == "failed" or sys.argv[1:]:
                print(f"{family}: {result.law} {result.status} {result.measured} {result.reason}", flush=True)
    broken = {(family, result.law) for family, result in failed(results_of)}
    print(f"{len(results_of)} families, {len(laws())} laws, {len(broken)} broken")
    if unknown := sorted(broken - {*explained()}):
        sys.exit(f"not explained: {unknown}; show it in unmodified transformers, or correct the law")
    if not sys.argv[1:]:
        MATRIX.write_text(matrix(results_of, positions), encoding="utf-8")
        PAGE.write_text(page(results_of, positions), encoding="utf-8")


if __name__ == "__main__":
    main()
