"""What the batteries of laws find on everything registered, kept for the pages of the site: trying them takes an hour.

make laws                        # try all that the newest result lacks
make laws ARGS="alibi mamba"     # try these again
"""

import json
import sys
from datetime import date

from fill_numbers import RESULTS, newest
from longitude.attention.mixer import list_mixers
from longitude.positions.base import list_encodings
from longitude.runs.files import atomic
from longitude.runs.machine import versions
from longitude.testing import laws, mixers
from longitude.testing.engine import Law
from longitude.testing.examples import Example, example, mixer_example

KEPT = ("status", "measured", "threshold", "reason")
"""Of a Result; its claim stands in the code."""


def subjects() -> dict[str, tuple[Example, dict[str, Law]]]:
    """Everything registered -> what its laws are tried on, and the laws."""
    of_encodings = {name: (example(name), laws()) for name in list_encodings()}
    return of_encodings | {name: (mixer_example(name), mixers.laws()) for name in list_mixers()}


def main() -> int:
    """Try, and write after each."""
    every, found = subjects(), newest("laws")["found"]
    for name, (build, battery) in every.items():
        known = {} if name in sys.argv[1:] else {law: found.get(name, {}).get(law) for law in battery}
        lacking = [law for law in battery.values() if not known.get(law.name)]
        if not lacking:
            continue
        results = {law.name: law(build).as_dict() for law in lacking}
        tried = {law: {key: result[key] for key in KEPT} for law, result in results.items()}
        found[name] = {law: tried.get(law) or known[law] for law in battery}
        broken = [law for law, result in found[name].items() if result["status"] == "failed"]
        print(name, f"breaks {', '.join(broken)}" if broken else "passed", flush=True)
        rows = {name: found[name] for name in every if name in found}
        with atomic(RESULTS / f"{date.today()}-laws.json") as unfinished:
            told = {"made": str(date.today()), "versions": versions(), "found": rows}
            unfinished.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
