"""A few dozen of the sceptic's cases; `make sceptic` runs thousands."""

import pytest

from tests.sceptic import run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", list(run.cases.KINDS))
def test_loops_agree(kind: str) -> None:
    assert run.main(["--cases", "12", "--kind", kind, "--seed", "100000"]) == 0


def test_a_wrong_sign_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With one formula changed, it fails and prints which case to run again."""
    monkeypatch.setattr(run.cases.loops, "slopes", lambda heads: [-1.0] * heads)
    assert run.main(["--cases", "60", "--kind", "attend"]) == 1
    assert "--kind attend: attend alibi: auto: values differ" in capsys.readouterr().out
