"""Units: found by what decides them, whole or not there, made by one process at a time."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from longitude.runs import store as store_module
from longitude.runs.store import FORMAT, BusyError, Store, Unit, key_of
from tests.support import refused

INPUTS = {"model": "3f", "length": 64, "depths": [0.0, 0.1], "text": None}


def make(store, unit, content="made"):
    with store.making(unit) as folder:
        (folder / "result.txt").write_text(content)


def test_a_key_is_of_the_inputs_alone():
    unit = Unit("loss", "rope 64", INPUTS)
    assert Unit("loss", "another label", dict(reversed(INPUTS.items()))).key == unit.key
    assert Unit("loss", "rope 64", json.loads(json.dumps(INPUTS | {"depths": (0.0, 0.1)}))).key == unit.key
    others = [Unit("loss", "rope 64", INPUTS | {name: "other"}) for name in INPUTS]
    others += [Unit("loss", "rope 64", INPUTS, version=2), Unit("train", "rope 64", INPUTS)]
    others += [Unit("loss", "rope 64", INPUTS | {"length": 64.0})]  # JSON tells numbers apart
    assert len({unit.key, *(other.key for other in others)}) == 1 + len(others)
    with pytest.raises(ValueError):
        key_of({"loss": float("nan")})


def test_a_unit_is_there_when_it_is_whole(tmp_path):
    store, unit = Store(tmp_path / "run"), Unit("loss", "a/b c", INPUTS)
    assert not store.holds(unit)
    with suppress(KeyboardInterrupt), store.making(unit) as folder:
        (folder / "half.txt").write_text("half")
        assert not store.holds(unit)
        raise KeyboardInterrupt
    assert not store.holds(unit)
    with store.making(unit) as folder:
        assert (folder / "half.txt").read_text() == "half"  # what was done is not done again
    assert store.holds(unit) and [path.name for path in store.units.iterdir()] == [unit.name]
    assert store.find("loss", unit.key) == store.folder(unit)
    with pytest.raises(BusyError):
        make(store, Unit("loss", "another label", INPUTS))
    assert [path.name for path in store.units.iterdir()] == [unit.name]


HOLD = """
import sys, time
from pathlib import Path
from longitude.runs.store import Store, Unit
with Store(Path(sys.argv[1])).making(Unit("loss", "other", {"n": 1})):
    print("held", flush=True)
    time.sleep(600)
"""


def test_another_process_holds_a_unit_until_it_dies(tmp_path):
    store, unit = Store(tmp_path), Unit("loss", "mine", {"n": 1})
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        assert store.is_busy(unit) and not store.holds(unit)
        for call in (lambda: make(store, unit), lambda: store.remove([unit])):
            with pytest.raises((BusyError, ValueError)):
                call()
        make(store, Unit("loss", "mine", {"n": 2}))
        other.kill()
    assert not store.is_busy(unit)
    make(store, unit)
    assert store.holds(unit) and not store.is_busy(unit)


def test_a_unit_that_another_process_finishes_before_our_lock_is_not_made_again(tmp_path, monkeypatch):
    """Its folder, with the lock that we opened, was renamed into place meanwhile."""
    place, unit = Store(tmp_path), Unit("loss", "mine", {"n": 1})
    lock = store_module.lock

    def late(descriptor, *more):
        place.unfinished(unit.kind, unit.key).rename(tmp_path / "elsewhere")
        return lock(descriptor, *more)

    monkeypatch.setattr(store_module, "lock", late)
    with pytest.raises(BusyError):
        make(place, unit)
    assert not list((tmp_path / "elsewhere").glob("result.txt"))


@pytest.mark.parametrize("content", [None, "", "[]", '{"kind": "loss"}', "other"])
def test_a_damaged_unit_is_named(tmp_path, content):
    store, unit, other = Store(tmp_path), Unit("loss", "a", {"n": 1}), Unit("loss", "b", {"n": 2})
    make(store, unit)
    make(store, other)
    about = store.folder(unit) / "unit.json"
    if content is None:
        about.unlink()
    else:
        about.write_text((store.folder(other) / "unit.json").read_text() if content == "other" else content)
    for call in (lambda: store.holds(unit), lambda: make(store, unit), lambda: store.remove([unit])):
        with pytest.raises(ValueError, match=re.escape(str(store.folder(unit)))):
            call()
    assert store.holds(other)


def test_a_flipped_bit_in_a_finished_unit_is_named(tmp_path):
    unit = Unit("loss", "a", {"n": 1})
    with Store(tmp_path).making(unit) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_bytes(bytes(100))
    weights = Store(tmp_path).folder(unit) / "model" / "weights"
    assert Store(tmp_path).holds(unit)
    for content in (bytes(99) + b"\1", b"", None):
        weights.unlink() if content is None else weights.write_bytes(content)
        with pytest.raises(ValueError, match="weights"):
            Store(tmp_path).holds(unit)
    weights.write_bytes(bytes(100))
    assert Store(tmp_path).holds(unit)
    about = Store(tmp_path).folder(unit) / "unit.json"
    whole = about.read_text()
    for sums in ([], {"model/weights": 100}, {"model/weights": {}}):
        about.write_text(json.dumps(json.loads(whole) | {"files": sums}))
        with pytest.raises(ValueError, match="weights"):
            Store(tmp_path).holds(unit)
    about.write_text(whole)
    os.mkfifo(weights.parent / "more")
    with pytest.raises(ValueError, match="more"):
        Store(tmp_path).holds(unit)


LINKS = ["units", "units/.loss-{key}", "units/.loss-{key}/.lock", "units/.loss-{key}/trainer", "units/loss-a-{key}"]


@pytest.mark.parametrize("place", LINKS)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_no_link_or_pipe_in_a_run_is_followed(tmp_path, place, kind):
    """A run's folder that somebody sent: what is computed stays in it, and what is elsewhere stays as it was."""
    unit, elsewhere = Unit("loss", "a", {"n": 1}), tmp_path / "elsewhere"
    (elsewhere / "checkpoint-1").mkdir(parents=True)
    path = tmp_path / "run" / place.format(key=unit.key)
    path.parent.mkdir(parents=True)
    target = elsewhere / "new" if path.name == ".lock" else elsewhere
    path.symlink_to(target) if kind == "link" else os.mkfifo(path)
    with pytest.raises(ValueError, match=str(path)):
        make(Store(tmp_path / "run"), unit)
    if path.name != "trainer":
        for call in (Store.is_busy, lambda store, unit: store.remove([unit])):
            with suppress(ValueError, BusyError):
                call(Store(tmp_path / "run"), unit)
    assert [each.relative_to(elsewhere) for each in elsewhere.rglob("*")] == [Path("checkpoint-1")]


def test_a_unit_of_a_newer_release_is_named(tmp_path):
    store, unit = Store(tmp_path), Unit("loss", "a", {"n": 1})
    make(store, unit)
    about = store.folder(unit) / "unit.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"format": FORMAT + 1}))
    with refused(what=str(store.folder(unit)), got=f"format {FORMAT + 1}"):
        store.holds(unit)


@dataclass
class Square:
    value: int


SHARE = """
import sys, time
from pathlib import Path
from longitude.runs.store import Store, Unit
def run(i, folder):
    with open(sys.argv[2], "a") as log:
        log.write(f"{i}\\n")
    time.sleep(0.02)
    return {"value": i * i}
Store(Path(sys.argv[1])).results([Unit("square", str(i), {"i": i}) for i in range(12)], run, dict)
"""


@pytest.mark.slow
def test_processes_share_the_units_of_a_list(tmp_path):
    given = [sys.executable, "-c", SHARE, str(tmp_path / "run"), str(tmp_path / "log")]
    processes = [subprocess.Popen(given) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert sorted(map(int, (tmp_path / "log").read_text().split())) == [*range(12)]
    units, known = [Unit("square", "other", {"i": i}) for i in (3, 11, 12)], []
    store = Store(tmp_path / "run")
    found = store.results(units, lambda i, folder: Square(144), Square, lambda *each: known.append(each))
    assert found == [Square(9), Square(121), Square(144)] == [result for _, result in known]


@pytest.mark.parametrize("value", [{}, {"value": "9"}, [9]])
def test_a_result_of_another_type_is_named(tmp_path, value):
    store, unit = Store(tmp_path), Unit("square", "a", {"i": 3})
    with pytest.raises(ValueError, match=str(store.folder(unit))):
        store.results([unit], lambda i, folder: value, Square)


def test_a_place_is_new_empty_or_of_units(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("mine")
    for place in (tmp_path / "thesis", tmp_path / "thesis" / "thesis.txt"):
        with pytest.raises(ValueError, match=str(place)):
            Store(place).ask("study", {})
    for name in ("empty", "killed"):
        (tmp_path / name).mkdir()
    (tmp_path / "killed" / ".question.json.1.tmp").touch()  # of a process that was killed there, or still writes
    for place in (tmp_path / "empty", tmp_path / "new" / "run", tmp_path / "killed", tmp_path / "empty"):
        Store(Path(place)).ask("study", {"asked": 1})
        assert Store(place).question() == {"verb": "study", "asked": 1}
    for content in ('{"verb": "measure"}', "3", "{}", "garbage"):
        (tmp_path / "empty" / "question.json").write_text(content)
        with pytest.raises(ValueError, match=str(tmp_path / "empty")):
            Store(tmp_path / "empty").ask("study", {})
        assert (tmp_path / "empty" / "question.json").read_text() == content
