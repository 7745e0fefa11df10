"""The documentation site: its source is put together in build/docs-source, and Sphinx makes build/docs of it.

python docs/make_site.py            # build/docs/index.html
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import make_claims
import make_pages
import make_reference

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCE, SITE = ROOT / "build" / "docs-source", ROOT / "build" / "docs"
SECTIONS = {
    "find-your-model": [],
    "start": ["README", "install"],
    "concepts": ["concepts/*"],
    "choose": [],
    "encodings": ["gallery", "encodings/*"],
    "mixers": ["mixers/*"],
    "guides": ["guides/*"],
    "api": ["api/*"],
    "reference": [
        "showing", "study-tasks", "measuring", "checking", "families", "extending", "serving", "audit",
        "ecosystem", "models", "patterns",
    ],
    "notebooks": ["examples/*"],
    "performance": [],
    "claims": ["claims/*"],
    "errata": [],
    "CHANGELOG": [],
    "CONTRIBUTING": [],
}  # fmt: skip
"""Pages of the first level -> those below them. One that nobody wrote lists those below it."""
SHORT = {
    "find-your-model": "Models",
    "start": "Start",
    "choose": "Choose",
    "api": "API",
    "claims": "Claims",
    "errata": "Errata",
    "CONTRIBUTING": "Contributing",
}
"""What the bar at the top calls them, where their title is long."""
LEADS = {
    "concepts": "Learn how a transformer gets positions, why it fails past its training length, and how to measure that.",
    "guides": "Follow one task from the first command to its result. Each guide takes minutes on two cores.",
    "reference": "Look up what a command or a part of the library does, with all its options and limits.",
    "notebooks": "Read and run whole examples: each notebook was executed, and its outputs are stored with it.",
}
"""What a page says that nobody wrote."""
GALLERY = "The [gallery](/gallery.md) shows all of them side by side, to sort.\n"
MODELS = "* **[Find your model](/find-your-model.md)**: its card, and whether it can be extended.\n"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]+)?\)|(?<=\]\()([^)#:\s]+)(?=[)#])")
"""A whole link; or the target of a picture."""
PICTURE = re.compile(r"<picture>.*?<img src=\"([^\"]+)\" alt=\"([^\"]+)\">\s*</picture>", re.DOTALL)
"""Of GitHub's two colorings; the site makes its own."""


def pages() -> dict[Path, Path]:
    """Every file that the site shows as it stands -> its place in the source of the site."""
    files = [each for each in DOCS.rglob("*") if each.suffix in (".md", ".svg", ".png")]
    elsewhere = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    protocol = ROOT / "benchmarks" / "claims" / "protocol.md"
    elsewhere += [*(ROOT / "examples").glob("*.ipynb")]
    return {each: each.relative_to(DOCS) for each in files if not each.relative_to(DOCS).parts[0].startswith("_")} | {
        **{each: each.relative_to(ROOT) for each in elsewhere},
        protocol: Path("claims", protocol.name),
    }


def linked(text: str, page: Path, places: dict[Path, Path]) -> str:
    """A page's text with its relative links, which are to files of the repository, as the site has them."""

    def moved(found: re.Match[str]) -> str:
        label, path, heading, bare = found.groups()
        target = (page.parent / (path or bare)).resolve()
        if target in places:
            address = f"/{places[target].as_posix()}{heading or ''}"
            return f"[{label}]({address})" if label else address
        if label and target.exists():  # code: its page here, if it has one, is not a file of the repository
            return f"{label} (`{target.relative_to(ROOT).as_posix()}`)"
        return found[0]

    return LINK.sub(moved, PICTURE.sub(r"![\2](\1)", text))


def indexed(text: str, kind: str) -> str:
    """A table of everything of a kind, whose names lead to their pages."""

    def row(line: str) -> str:
        first, cut, rest = line.partition(" | ")
        return re.sub(r"`(\w+)`", rf"[`\1`](/{kind}/\1.md)", first) + cut + rest if line.startswith("| `") else line

    return "\n".join(map(row, text.split("\n")))


TO_CLAIM = re.compile(r"(?<=\()/claims\.md#(\d[\w-]*|the-studies)(?=\))")
CLAIM_ROW = re.compile(r'<a id="([\w-]+)"></a>(\w+)')
"""The first cell of a claim's row: where links lead on GitHub."""


def to_claim(text: str) -> str:
    """Links to rows of docs/claims.md, as links to the site's page of each claim."""
    return TO_CLAIM.sub(lambda found: f"/claims/{found[1].removeprefix('the-')}.md", text)


def put(path: Path, content: str | bytes) -> None:
    """Write what differs: Sphinx reads again what is newer."""
    data = content.encode() if isinstance(content, str) else content
    if not path.exists() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def toctree(entries: list[str], *options: str) -> str:
    return "\n".join(["```{toctree}", *options, "", *entries, "```"])


def titled(name: str) -> str:
    """An entry of the first level."""
    return f"{SHORT[name]} <{name}>" if name in SHORT else name


def counted(page: str) -> list[Any]:
    """A key that sorts claim 2a before claim 10a."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", page)]


def sections(made: set[str]) -> Iterator[tuple[str, str]]:
    """(page of the first level, its text at the end); made: all pages."""
    ordered = sorted(made, key=counted)
    for name, patterns in SECTIONS.items():
        below = [page for pattern in patterns for page in ordered if PurePath(f"/{page}").match(f"/{pattern}")]
        if name not in made and below:
            yield name, f"# {name.capitalize()}\n\n{LEADS[name]}\n\n{toctree(below, ':maxdepth: 1')}\n"
        elif below:
            yield name, f"\n{toctree(below, ':hidden:')}\n"


def stage(source: Path) -> None:
    """Put the source of the site together: pages of the repository, and pages made from code."""
    places = pages()
    texts: dict[str, str] = {}
    for path, place in places.items():
        if path.suffix == ".md":
            texts[place.as_posix()] = linked(path.read_text(encoding="utf-8"), path, places)
        else:
            put(source / place, path.read_bytes())
    texts["claims.md"] = CLAIM_ROW.sub(r"[\2](/claims/\1.md)", texts["claims.md"])
    for name, text in make_claims.pages(source / "claims"):
        texts[f"{name}.md"] = linked(text, DOCS / "claims.md", places)
    texts |= {f"{name}.md": text for name, text in make_pages.pages(source)}
    texts |= {f"{name}.rst": text for name, text in make_reference.pages()}
    for kind in ("encodings", "mixers"):
        head, cut, rest = texts[f"{kind}.md"].partition("\n## ")  # later tables are of other things
        texts[f"{kind}.md"] = indexed(head, kind) + cut + rest
    texts["encodings.md"] = texts["encodings.md"].replace("\n|", f"\n{GALLERY}\n|", 1)
    texts["index.md"] = texts["index.md"].replace("\n* ", f"\n{MODELS}* ", 1)
    texts = {name: to_claim(text) for name, text in texts.items()}
    made = {*texts, *(place.as_posix() for place in places.values() if place.suffix == ".ipynb")}
    names = {name.rpartition(".")[0] for name in made}
    for name, end in sections(names):
        texts[f"{name}.md"] = texts.get(f"{name}.md", "") + end
        names.add(name)
    texts["index.md"] += "\n" + toctree([titled(name) for name in SECTIONS if name in names], ":hidden:") + "\n"
    for name, text in texts.items():
        put(source / name, text)
    for old in source.rglob("*.*"):
        if old.suffix in (".md", ".rst", ".ipynb") and old.relative_to(source).as_posix() not in {*texts, *made}:
            old.unlink()


def build(source: Path = SOURCE, site: Path = SITE) -> int:
    """Put the source together and make the site of it; every warning of Sphinx is an error. Returns its exit code."""
    from sphinx.cmd.build import main as sphinx

    stage(source)
    site.mkdir(parents=True, exist_ok=True)
    parsed = source.parent / "docs-parsed"  # Sphinx keeps pages there for its next run
    done = sphinx(["-c", str(DOCS), "-b", "html", "-nWq", "--keep-going", "-d", str(parsed), str(source), str(site)])
    for each in site.rglob("*.map"):  # of the theme's own sources
        each.unlink()
    return done


if __name__ == "__main__":
    sys.exit(build())
