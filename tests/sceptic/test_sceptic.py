"""A few dozen of the sceptic's cases; `make sceptic` runs thousands."""

import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("sceptic", Path(__file__).with_name("run.py"))
assert spec is not None and spec.loader is not None
sceptic = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sceptic)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", list(sceptic.cases.KINDS))
def test_loops_agree(kind: str) -> None:
    assert sceptic.main(["--cases", "12", "--kind", kind, "--seed", "100000"]) == 0


def test_a_wrong_sign_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The harness itself: with one formula turned over, it fails and says which case to run again."""
    monkeypatch.setattr(sceptic.cases.loops, "slopes", lambda heads: [-1.0] * heads)
    assert sceptic.main(["--cases", "40", "--kind", "attend"]) == 1
    assert "--kind attend: attend alibi: auto: values differ" in capsys.readouterr().out
