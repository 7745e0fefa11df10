"""The page of models: a card of every released file that transformers has a class for, and the commands for it."""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from longitude.checkpoints.declared import declared_length, text_part
from longitude.checkpoints.load import Source, built_without_weights, config_of
from longitude.drawings.card import write
from longitude.extend.plan import FARTHEST, Target, plan_extension

HERE = Path(__file__).parent
RELEASED = HERE.parent / "tests" / "checkpoints" / "released.json"
FACTOR = 4
"""Of the longer length over the declared one."""
METHODS = ("yarn", "linear", "ntk")
"""The first that a model can be extended by stands on the page."""
TEXT = re.compile(r"<desc[^>]*>(.*?)</desc>", re.DOTALL)


class Model(NamedTuple):
    """folder: of its config.json; alternative: text of its card; extend: the command, or None; refusal: why there is none."""

    name: str
    folder: str
    year: str
    released: str
    kind: str
    alternative: str
    extend: str | None
    refusal: str | None


def page(source: Path, environment: Environment) -> str:
    """The page; its files are written to the source of the site."""
    return environment.get_template("find-your-model.md.j2").render(models=[*models(source)])


def models(source: Path) -> Iterator[Model]:
    """Those whose class transformers has."""
    for name, row in json.loads(RELEASED.read_text(encoding="utf-8")).items():
        kind = row["config"].get("model_type")
        if kind not in CONFIG_MAPPING:
            continue
        folder = re.sub(r"[^\w.]+", "-", name)
        file = source / "cards" / folder / "config.json"
        picture = file.parents[1] / f"{folder}.svg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(row["config"], indent=1), encoding="utf-8")
        write(str(file), picture)
        [text] = TEXT.findall(picture.read_text(encoding="utf-8"))
        day = row["released"]
        yield Model(name, folder, day[:4], day, kind, html.unescape(text), *extension(folder, file))


def extension(name: str, file: Path) -> tuple[str | None, str | None]:
    """(the command that makes a model FACTOR times as long, None) if its plan can be made, else (None, the reason)."""
    config, raw = config_of(file), json.loads(file.read_text(encoding="utf-8"))
    if type(config) not in AutoModelForCausalLM._model_mapping and raw["model_type"].endswith("_text"):
        return None, "only the part of its config about text is here: give the folder of the whole model"
    text, refusals = text_part(config), list[str]()
    to = min(FACTOR * (declared_length(text) or 1), FARTHEST)  # without a length, its plan is refused first
    for method in METHODS:
        try:
            skeleton = built_without_weights(name, config)
            source = Source(name, Path(name), raw, raw.get("text_config", raw), text, skeleton)
            plan_extension(source, Target(to=to, method=method), must_fit=False)
        except ValueError as refusal:
            refusals.append(re.sub(f"^({re.escape(name)}(/config.json)?|config.json):? ", "", str(refusal)))
        else:
            return f"longitude extend {name} --to {to} --method {method} --out {name}-{to}", None
    return None, refusals[0]
