"""Copy a GGUF file with other keys of positions: the weights are unchanged, bit for bit."""

import io
from contextlib import redirect_stderr
from pathlib import Path

from longitude.check.against import against
from longitude.checkpoints.gguf import BETAS, GGUF
from longitude.errors import UsageError
from longitude.extend.plan import ExtendPlan
from longitude.extend.serve import gguf_keys
from longitude.runs.files import place, require_space


def require_keys(plan: ExtendPlan, file: Path) -> dict[str, str | int | float]:
    """The keys of the copy, after the architecture. ValueError if llama.cpp would not rotate by them as the plan asks."""
    try:
        keys = gguf_keys(plan)
    except ValueError as error:
        method = f"--method {plan.target.method}"
        raise UsageError("--gguf", "a scheme that a GGUF file's keys can set", method, f"llama.cpp: {error}") from error
    if any("beta" in key for key in keys) and GGUF(file).architecture not in BETAS:
        raise UsageError("--gguf", "betas of 32 and 1, which llama.cpp uses for this architecture", str(plan.scheme))
    return keys


def write_copy(plan: ExtendPlan, file: Path, out: Path, folder: Path) -> None:
    """Write `out`, a copy of the GGUF file that the checkpoint was unpacked from, with the keys of an extension.

    The copy is compared with the extended checkpoint, as `longitude check FOLDER --against FILE` does, before it gets its name.

    Args:
        plan: The extension.
        file: The GGUF file of the original weights.
        out: The new file.
        folder: The extended checkpoint.

    Raises:
        ValueError: For a scheme that no keys can set, too little disk, and a copy that differs from the checkpoint.
    """
    import gguf
    from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

    require_space(out.absolute().parent, file.stat().st_size, "the copy of the GGUF file")
    source = GGUF(file)
    kinds = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    keys = {f"{source.architecture}.{key}": value for key, value in require_keys(plan, file).items()}
    details = {key: MetadataDetails(kinds[type(value)], value) for key, value in keys.items()}
    aside = out.with_name(f".{out.name}.work.gguf")
    writer = gguf.GGUFWriter(aside, source.architecture, endianess=source.reader.endianess)
    writer.data_alignment = source.reader.alignment
    try:
        with redirect_stderr(io.StringIO()):  # its progress bar
            copy_with_new_metadata(source.reader, writer, details, [])
        for fact in against(folder, aside):
            if fact.differs:
                raise UsageError(f"--gguf {out}: {fact.name} of the copy", str(fact.here), str(fact.there))
        place(aside, out)
    finally:
        aside.unlink(missing_ok=True)
