"""The public API is the committed one, docs/public_api.txt: it changes on purpose."""

import pytest

import longitude as lg
import make_signatures


def test_the_public_api_is_frozen() -> None:
    found = make_signatures.difference(make_signatures.FILE.read_text(encoding="utf-8"), make_signatures.text())
    assert found == [], "\n".join([make_signatures.ADVICE, *found])


class Sloped(lg.ALiBi):
    """ALiBi, with one option and one method more."""

    def __init__(self, num_heads: int, steep: bool = False) -> None:
        super().__init__(num_heads)

    def places(self, ids, random_start=True):
        return ids

    @staticmethod
    def of(heads: int) -> "Sloped":
        return Sloped(heads)


CHANGES = {
    "a function is gone": ("attend", None),
    "an option is renamed": ("merge_attention", lambda outs, weights: outs),
    "a default is another": ("mixer", lambda name="attention", **options: name),
    "a method is another": ("ALiBi", Sloped),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = make_signatures.text()
    changed, value = CHANGES[name]
    lg.attend, lg.merge_attention, lg.mixer, lg.ALiBi  # noqa: B018 (loaded, so that they can be replaced)
    if value is None:
        monkeypatch.setattr(lg, "__all__", [each for each in lg.__all__ if each != changed])
    else:
        for thing in (Sloped, Sloped.__init__):  # as one of the library's
            monkeypatch.setattr(thing, "__module__", "longitude.positions.bias")
        monkeypatch.setattr(lg, changed, value)
    found = make_signatures.difference(before, make_signatures.text())
    assert any(line.startswith(f"-lg.{changed}(") for line in found)
    if changed == "ALiBi":
        assert {"+lg.ALiBi(num_heads, steep=False)", "+lg.ALiBi.of(heads)"} <= set(found)
        assert "+lg.ALiBi.places(ids, random_start=True)" in found


def test_what_the_file_holds() -> None:
    """At least: a function, a class, a method, a property, a word in quotes."""
    lines = set(make_signatures.FILE.read_text(encoding="utf-8").splitlines())
    assert {
        "lg.Encoding.terms(context)",
        "lg.Encoding.source",
        "lg.models.LongitudeConfig is lg.LongitudeConfig",
    } <= lines
    assert any(line.startswith("lg.attend(q, k, v, *, encoding=None") for line in lines)
    assert any(line.startswith('encoding "alibi" (num_heads') for line in lines)
    assert not any(" at 0x" in line for line in lines)
