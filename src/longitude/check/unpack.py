"""Unpack a GGUF file into the folder of a checkpoint, which every command reads, and compare that with the file."""

import hashlib
import io
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from longitude.check.against import against
from longitude.checkpoints.gguf import FACTORS, GGUF, LISTS, LONG, SHORT
from longitude.checkpoints.load import in_one_line
from longitude.errors import UsageError
from longitude.runs.files import place
from longitude.runs.memory import available_memory, require_memory
from longitude.runs.quiet import quiet

FOLDER = Path("runs/gguf")
"""Where the commands keep what they unpacked."""
BYTES = 4
"""Bytes of an unpacked weight: float32, which represents every kind of quantized number."""
SPARE = 1.2
"""Free memory and disk for each byte of weights."""

LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the Gemma with 27 billion parameters, by architecture (llama.cpp, load_hparams of each model)."""

Note = Callable[[str], Any]


def unpacked(name: str, note: Note = lambda _: None, inside: Path = FOLDER) -> str:
    """The folder of the checkpoint made from a GGUF file; any other name is returned unchanged.

    The folder is made once for each state of the file, under a lock.

    Args:
        name: The model argument of a command.
        note: Takes one sentence before the weights are unpacked.
        inside: Folder of these folders.

    Raises:
        ValueError: For a file that cannot be read, or of which no equal checkpoint can be made.
    """
    file = Path(name).expanduser()
    if file.suffix.lower() != ".gguf" or file.is_dir():
        return name
    if not file.is_file():
        raise ValueError(f"{name}: there is no such file")
    state = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:8]
    folder = inside / f"{file.stem}-{key}"
    try:
        inside.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        got = f"{error.strerror} ({inside.absolute()})"
        raise UsageError(
            f"{name}: unpacked into {inside}", "a folder to write to", got, "start in another folder"
        ) from error
    with FileLock(inside / f".{folder.name}.lock"):
        if not folder.exists():
            unpack(file, folder, note)
    return str(folder)


def unpack(path: Path, folder: Path, note: Note = lambda _: None) -> None:
    """Write the checkpoint of a GGUF file: config, tokenizer and weights in float32.

    transformers unpacks the weights and reads the base of the rotation. The scheme comes from the file, as llama.cpp reads it.
    The new folder is compared with the file, as `longitude check FOLDER --against FILE` does, and kept only if nothing differs.

    Args:
        path: The GGUF file.
        folder: The new folder.
        note: Takes one sentence before the weights are unpacked.

    Raises:
        ValueError: For a file that transformers does not read, one without a tokenizer or a context length, a scheme that
            transformers has no name for, too little memory or disk, and for a folder that differs from the file.
    """
    file = GGUF(path)
    for key in (f"{file.architecture}.context_length", "tokenizer.ggml.tokens"):
        if file.field(key) is None:
            raise UsageError(str(path), f"the key {key}", "none", "convert the model again, with its tokenizer")
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    with quiet(), in_one_line(f"{path}: transformers cannot read its architecture, {file.architecture}"):
        config = AutoConfig.from_pretrained(**source)
    with_scheme(config, file)
    with_scores(config, file)
    weights = BYTES * sum(int(tensor.n_elements) for tensor in file.reader.tensors)
    require_memory(SPARE * weights, available_memory(), f"{path}: unpacking takes", "take a smaller model")
    if (free := shutil.disk_usage(folder.parent).free) < SPARE * weights:
        raise UsageError(
            f"{path}: unpacked into {folder}", f"{SPARE * weights / 1e9:.1f} GB on the disk", f"{free / 1e9:.1f} GB"
        )
    note(f"unpacking {path} into {folder}, once")
    with TemporaryDirectory(prefix=".", dir=folder.parent) as temporary:
        made = Path(temporary) / folder.name
        # transformers draws a bar that no setting turns off.
        with quiet(), redirect_stderr(io.StringIO()), in_one_line(f"{path}: transformers cannot unpack it"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **source, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
            )
            model, info = loaded
            tokenizer = AutoTokenizer.from_pretrained(**source)
        for name, saved, expected in sorted(info["mismatched_keys"]):
            raise UsageError(
                f"{path}: {name}", f"{list(expected)}, by what transformers reads of its keys", list(saved)
            )
        if missing := sorted(info["missing_keys"]):
            raise UsageError(str(path), "all tensors of the model", f"none for {', '.join(missing[:3])}")
        with quiet():
            # Without these marks of a quantized model transformers saves it.
            model.is_quantized = model.hf_quantizer = model.quantization_method = None
            vars(model.config).pop("quantization_config", None)
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
        try:
            facts = against(made, path)
        except ValueError as error:  # the user knows the file, not the temporary folder
            raise ValueError(
                str(error).replace(f"{made}/config.json", str(path)).replace(str(made), str(path))
            ) from error
        for fact in facts:
            if fact.differs:
                raise UsageError(
                    f"{path}: {fact.name} of what transformers unpacks", f"{fact.there}, as in the file", fact.here
                )
        place(made, folder)


def with_scores(config: PreTrainedConfig, file: GGUF) -> None:
    """Set what transformers does not read, soft caps and the scale of queries. ValueError for keys that no config has."""
    text: Any = config.get_text_config()
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := file.own(key)) is not None:
            if not hasattr(text, key):
                raise UsageError(f"{file.path}: {key}", f"none in a {config.model_type} of transformers", cap)
            setattr(text, key, float(cap))
    if file.architecture in LARGEST:
        # No key has the scale: llama.cpp uses head_dim, except in the 27B model, which it recognizes by its layers.
        large = text.num_hidden_layers == LARGEST[file.architecture]
        text.query_pre_attn_scalar = text.hidden_size // text.num_attention_heads if large else text.head_dim
    for key in ("attention.scale", "logit_scale", "residual_scale", "embedding_scale"):
        if (scale := file.own(key)) is not None:
            raise UsageError(
                f"{file.path}: {key}", f"none, as transformers does not read it for {file.architecture}", scale
            )


def with_scheme(config: PreTrainedConfig, file: GGUF) -> None:
    """Set the RoPE scaling of a config as llama.cpp reads it from the file. ValueError for one that transformers cannot have."""
    facts = file.facts()
    kind, factor, original = facts["scaling"], facts["factor"], facts["original length"] or facts["declared length"]
    if kind == "none" and not facts["factors of frequencies"]:
        return
    if facts["factors of frequencies"] or "rope_theta" not in (config.rope_parameters or {}):
        got = facts["factors of frequencies"] or f"{kind} in a model with one for each kind of layers"
        raise UsageError(f"{file.path}: RoPE scaling", "one that is known for its architecture", got)
    parameters: dict[str, Any] = {"rope_theta": facts["base"], "rope_type": kind}
    if kind == "linear":
        parameters["factor"] = factor or 1.0
    elif kind == "yarn" and facts["attention factor"] is not None:
        parameters |= {"factor": factor or 1.0, "original_max_position_embeddings": original}
        parameters |= {"beta_fast": facts["beta fast"], "beta_slow": facts["beta slow"]}
        parameters["attention_factor"] = facts["attention factor"]
    elif kind in ("llama3", "longrope"):
        # The factors of frequencies as they are in the file: transformers supports such lists only in LongRoPE.
        names = {SHORT: FACTORS, LONG: FACTORS} if kind == "llama3" else LISTS
        lists = {key: file.factors(names[key]) for key in (SHORT, LONG)}
        parameters |= {"rope_type": "longrope", "short_factor": lists[SHORT], "long_factor": lists[LONG]}
        parameters |= {"original_max_position_embeddings": original, "attention_factor": facts["attention factor"]}
    else:
        raise UsageError(f"{file.path}: RoPE scaling", "linear, yarn, longrope or factors of frequencies", kind)
    config.rope_parameters = parameters
