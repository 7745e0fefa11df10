"""A GGUF file of an extended checkpoint: `check` finds no difference, transformers reads its weights, llama.cpp its positions."""

import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from longitude.check.against import against
from tests.extend.conftest import LENGTH, logits, saved
from tests.support import close

pytest.importorskip("gguf")

pytestmark = [pytest.mark.slow, pytest.mark.ecosystem]

write = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "write_gguf.py"))["write"]
METHODS = ["linear", "ntk", "ntk-by-parts", "yarn", "llama3"]


@pytest.fixture
def pair(request, tmp_path, command):
    """(an extended Llama, its GGUF file)."""
    source, folder, file = saved("llama", tmp_path / "model"), tmp_path / "longer", tmp_path / "longer.gguf"
    assert command("extend", source, "--to", 4 * LENGTH, "--method", request.param, "--out", folder)[0] == 0
    write(folder, file)
    return folder, file


@pytest.mark.parametrize("pair", METHODS, indirect=True)
def test_nothing_contradicts(pair):
    facts = {fact.name: fact for fact in against(*pair)}
    assert [name for name, fact in facts.items() if fact.differs] == []
    assert facts["declared length"].there == 4 * LENGTH
    assert {"half", "interleaved"} <= {*str(facts["queries and keys"].there).split()}


@pytest.mark.parametrize("pair", ["ntk"], indirect=True)
def test_transformers_reads_it(pair):
    """Another reader, which undoes the order of rows: the logits of the checkpoint. (It reads a base, but no scheme.)"""
    folder, file = pair
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).eval()
    close(logits(read, 4 * LENGTH), logits(plain, 4 * LENGTH), 1e-5)


@pytest.mark.parametrize("pair", METHODS, indirect=True)
def test_llama_cpp_has_the_same_logits(pair):
    """The engine itself, where somebody has built it: pip install llama-cpp-python."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: it needs a compiler")
    folder, file = pair
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(3, 250, (1, 4 * LENGTH), generator=torch.Generator().manual_seed(0))
    exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}  # of its cache: float16 by default
    engine = llama_cpp.Llama(str(file), n_ctx=4 * LENGTH, n_threads=1, logits_all=True, verbose=False, **exact)
    engine.eval(ids[0].tolist())
    with torch.no_grad():
        close(torch.from_numpy(engine.scores[: 4 * LENGTH].copy()), model(ids).logits[0], 1e-3)
