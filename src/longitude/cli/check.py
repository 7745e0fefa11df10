"""`longitude check`."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from longitude.cli.shared import DONE, FAILURES, UNTRIED, changed, keep_threads_from_spinning, print_json
from longitude.errors import Within, check_bounds

PLACE = re.compile(r"(?P<place>[^:]+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)(?::(?P<options>.*))?")
COLORS = ("green", "bold red", "dim", "yellow")
"""Of the statuses of a Result, in their order."""

GROUPS = {
    "test": "length reference against serve laws quick seed",
    "server": "model tokenizer trials thinking chat concurrency plan out",
    "execution": "dtype device",
}
EXAMPLES = """  longitude check models/llama --quick
  longitude check http://localhost:8000/v1 --model NAME --plan"""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What is tested, and how.

    Args:
        length: Tokens that laws of a model compare; by default 16 beyond its training length, 256 at most.
        reference: A model that must give the same logits; shows weights in the wrong rotary layout.
        against: Compare with the positions that another file states: a .gguf file or another checkpoint. Exit code 1 where they
            contradict each other.
        serve: A line that serves the model, or a file with one: what vLLM, SGLang, llama.cpp, transformers or mlx-lm does with
            positions by it, and a corrected line. MODEL may be a config.json or a GGUF file alone.
        laws: The laws to try, by name ("left_padding"); all by default.
        quick: Try the laws that need no weights, on a small random model of the same config.json: seconds, whatever the
            checkpoint's size. MODEL may be a config.json alone.
        dtype: Data type of the model: float32, bfloat16 or float16; by default the saved one.
        device: Where the model computes: cpu, cuda, mps.
        seed: Seed for the random input tokens; for a server, of texts and numbers.
        model: The server's name of the model.
        tokenizer: Folder or hub name of the model's tokenizer, for a server that counts no tokens for others.
        trials: Calls of each kind, over the fewest, for a server.
        thinking: Tokens for thinking before an answer of a server.
        chat: Ask a server in messages of a chat; --no-chat asks it to continue text.
        concurrency: Requests to a server at a time.
        plan: Ask a server two questions, and print calls, tokens and minutes of each law.
        out: Where the calls of a server are kept; the same command continues.
    """

    length: int | None = None
    reference: str | None = None
    against: str | None = None
    serve: str | None = None
    laws: tuple[str, ...] = ()
    quick: bool = False
    dtype: str | None = None
    device: str = "cpu"
    seed: Annotated[int | None, Within(0, 2**32 - 1)] = None
    model: str | None = None
    tokenizer: str | None = None
    trials: Annotated[int, Within(1)] = 1
    thinking: Annotated[int, Within(0)] = 0
    chat: bool = True
    concurrency: Annotated[int, Within(1)] = 4
    plan: bool = False
    out: Path = Path("runs/check")

    def refuse(self, why: str, *names: str) -> None:
        """ValueError for the first of these options that was given: it would be ignored."""
        if options := changed(self, names):
            raise ValueError(f"{options[0]} {why}; leave one of them out")


OF_MODELS = ("length", "reference", "dtype", "quick", "device", "seed")
OF_SERVERS = ("model", "tokenizer", "trials", "thinking", "chat", "concurrency", "plan", "out")


def check(
    model_or_part: Annotated[str, tyro.conf.Positional],
    options: Annotated[CheckOptions, tyro.conf.arg(name="")],
    all: bool = False,
    json: bool = False,
) -> int:
    """Test a checkpoint, an encoding or a mixer for position bugs.

    Exit code: 0 every test ran and passed, 1 a test failed, 2 wrong use, 3 something could not be judged.

    Args:
        model_or_part: A folder or hub name of a causal model. Or a recipe (YAML, a Dockerfile, a unit of systemd, JSON of
            arguments): the line in it is checked. Or an encoding ("alibi", "rope:base=500000") or a mixer
            ("mamba", "window:size=8"). Or your own class: module:Class, path/file.py:Class, module:Class:num_heads=4,slope=3.
            Or your own function that returns a causal model of transformers: path/file.py:build. Its file is run.
            Or the address of a server with the API of OpenAI: http://localhost:8000/v1.
        options: How.
        all: Print every law, not only those that failed or could not be judged.
        json: Print JSON, with all laws and numbers.
    """
    keep_threads_from_spinning()
    from longitude.runs.terminal import Progress

    if model_or_part.startswith(("http://", "https://")):
        options.refuse(
            "is for laws of a checkpoint, and an address is a server", "against", "serve", "quick", "dtype", "device"
        )
        return check_server(model_or_part, options, all, json)
    options.refuse("is for servers, and this is none", *OF_SERVERS)
    if options.serve is not None or is_file_of_lines(model_or_part):
        options.refuse("is for laws, and a line that serves tries none", *OF_MODELS, "laws", "against")
        return check_lines(model_or_part, options.serve, json, all)
    target, model = part_of(model_or_part), None
    if target is not None:
        from longitude.check.parts import model_of

        if (model := model_of(*target)) is None:
            options.refuse(f"is for models, and {model_or_part} is an encoding or a mixer", *OF_MODELS, "against")
        else:
            target = None
            options.refuse(f"is for saved models, and {model_or_part} builds one", "quick", "dtype", "against")
    if options.against is not None:
        options.refuse("is for laws, and --against tries none", *OF_MODELS, "laws")
        return compare(model_or_part, options.against, json)
    with Progress() as progress:
        if target is not None:
            from longitude.check.parts import battery_of, check_part

            results = check_part(*target, laws=options.laws, on_law=progress.update)
            protocol: dict[str, Any] = {"kind": battery_of(*target).noun}
        else:
            results, protocol = check_model(model_or_part, options, progress, model)
    return finish(model_or_part, protocol, results, all, json)


def check_model(
    model: str, options: CheckOptions, progress: Any, made: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The laws of a model, and how they were tried. made: the model in memory, if a function of the user's returned it."""
    from longitude.check.quick import QUICK, random_model
    from longitude.check.run import check_subject, subject_of
    from longitude.checkpoints.declared import raw_config
    from longitude.checkpoints.load import load

    def loaded(name: str):
        progress.update(f"loading {name}", 0, 1)
        how: dict[str, Any] = {name: getattr(options, name) for name in ("dtype", "device")}
        return load(name, tokenizer=False, images=True, **how)

    reference = options.reference
    laws, inputs = options.laws, {"length": options.length, "seed": options.seed or 0}
    if options.quick:
        options.refuse("is for weights, and --quick reads none", "reference", "dtype")
        random = random_model(model, options.seed or 0).to(options.device)
        subject = subject_of(random, raw=raw_config(model), folder=model, **inputs)
        laws = laws or QUICK
    else:
        if model.endswith(".json"):
            raise ValueError(f"{model}: a config.json has no weights; --quick tries the laws that need none")
        checkpoint = loaded(model) if made is None else made.to(options.device)
        subject = subject_of(checkpoint, reference=None if reference is None else loaded(reference), **inputs)
    subject.on_progress = lambda share: progress.update(None, int(progress.done) + min(share, 0.99))
    results = check_subject(subject, laws, progress.update)
    return results, {
        "kind": "model",
        "weights": "random, few heads" if options.quick else None,
        "tokens": subject.reach,
        "dtype": str(next(subject.model.parameters()).dtype).removeprefix("torch."),
        "equality laws in": str(subject.kind).removeprefix("torch."),
        "reference": reference,
        "seed": options.seed or 0,
    }


def compare(model: str, other: str, json: bool) -> int:
    """`check --against`."""
    from longitude.check.against import against
    from longitude.report.table import show as display, table

    facts = against(model, other)
    wrong = [fact.name for fact in facts if fact.differs]
    if json:
        print_json({"checked": model, "against": other, "differ": wrong, "facts": [vars(fact) for fact in facts]})
        return FAILURES if wrong else DONE

    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    rows = [(fact.name, cell(fact.here), cell(fact.there), "differs" * fact.differs) for fact in facts]
    verdict = f"{len(wrong)} differ: {', '.join(wrong)}" if wrong else "nothing contradicts"
    display(table("", "the checkpoint", "the other", "", rows=rows, words=4), f"\n{model} against {other}: {verdict}")
    return FAILURES if wrong else DONE


def is_file_of_lines(name: str) -> bool:
    """Whether a name is a file, and that of a recipe."""
    if not Path(name).is_file() or Path(name).suffix in (".py", ".gguf"):
        return False
    from longitude.serving.check import is_recipe

    return is_recipe(Path(name))


def check_lines(model: str, serve: str | None, json: bool, all: bool) -> int:
    """`check --serve`, and `check RECIPE`."""
    if all:
        raise ValueError("--all prints laws, and a line that serves tries none; leave it out")
    from longitude.report.table import show as display
    from longitude.serving import check as serving

    results = serving.check_lines(None, model) if serve is None else serving.check_lines(model, serve)
    if json:
        print_json([serving.as_json(*result) for result in results])
    else:
        display(*(part for result in results for part in serving.screen(*result)))
    verdicts = {finding.verdict for _, rows, _ in results for finding in rows}
    return FAILURES if "wrong" in verdicts else UNTRIED if "unknown" in verdicts else DONE


def check_server(url: str, options: CheckOptions, all: bool, json: bool) -> int:
    """`check http://...`."""
    from longitude.measure.endpoint import Endpoint
    from longitude.measure.transport import address
    from longitude.runs.terminal import Progress
    from longitude.served import run
    from longitude.served.laws import LAWS

    check_bounds(options)
    if options.model is None:
        raise ValueError(f"{url}: --model NAME, the server's name of the model, is missing; {url}/models lists them")
    server = Endpoint(address(url), options.model, options.concurrency, options.thinking, options.chat)
    names = ("tokenizer", "length", "reference", "trials", "seed")
    laws = LAWS.chosen(options.laws)
    with Progress() as progress:
        progress.update(f"asking {url}", 0, 1)
        served = run.connect(server, options.out, **{name: getattr(options, name) for name in names})
        if options.plan:
            return print_plan(run.costs(served, laws), json)
        progress.total = sum(len(group) for groups in run.calls_of(served, laws).values() for group in groups)
        results = run.check(
            served,
            laws,
            lambda law, *_: progress.update(law, int(progress.done)),
            lambda: progress.update(None, int(progress.done) + 1),
        )
    requests = {
        law: served.command(trial, options.out / f"{law}.json")
        for law, trial in served.evidence.items()
        if results[law].status == "failed"
    }
    protocol = {"kind": "server", "model": options.model, "tokens": served.longest, "seed": served.seed}
    protocol["calls sent"] = len(served.sent)  # the others were kept
    return finish(url, protocol, results, all, json, requests)


def print_plan(costs: Any, json: bool) -> int:
    """`check http://... --plan`."""
    from longitude.cli.shared import duration
    from longitude.report.table import show as display, table

    if json:
        print_json([dict(zip(("law", "calls", "tokens", "seconds"), row)) for row in costs])
        return DONE
    _, *columns = zip(*costs)
    total = ("all", *(sum(column) for column in columns))
    rows = [(law, f"{calls:,}", f"{tokens:,}", duration(seconds)) for law, calls, tokens, seconds in (*costs, total)]
    display(table("law", "calls", "tokens", "time", rows=rows), "\nTime is by two calls, a short one and a longer one.")
    return DONE


def part_of(name: str) -> tuple[Any, dict[str, Any]] | None:
    """The class and options that a name of an encoding or a mixer stands for; None for a model, such as any folder."""
    if Path(name).is_dir():
        return None
    from longitude.attention.mixer import list_mixers
    from longitude.labels import parse_label, parse_options
    from longitude.positions.base import list_encodings

    if re.split(r"[:+]", name)[0] in (*list_mixers(), *list_encodings()):
        label = parse_label(name)
        named = [*label.encodings, *label.mixers]
        if len(named) > 1:
            raise ValueError(f"{name}: expected one encoding or mixer, got {len(named)}; check each, then compose them")
        options = named[0]
        return options.pop("name"), options
    if (place := PLACE.fullmatch(name)) is None:
        return None
    from longitude.check.parts import from_file_or_module

    options = parse_options(place["options"] or "", f"{place['place']}:{place['name']}:option=value", name)
    return from_file_or_module(place["place"], place["name"]), options


# ---- output ------------------------------------------------------------------------------------------------------------
def finish(
    checked: str,
    protocol: Mapping[str, Any],
    results: Mapping[str, Any],
    every: bool,
    json: bool,
    requests: Mapping[str, str] | None = None,
) -> int:
    """Print results, and return the exit code. requests: law -> the command that shows a server's failure again."""
    from longitude.testing.engine import counted

    count = counted(results)
    if json:
        rows = [result.as_dict() for result in results.values()]
        if requests is not None:
            rows = [row | {"request": requests.get(row["law"])} for row in rows]
        numbers = {status: count[status] for status in ("failed", "unknown")}
        print_json({"checked": checked, **protocol, **numbers, "laws": rows})
    else:
        show(checked, protocol, results, every)
        for law, command in (requests or {}).items():
            print(f"{law}: {command}")
    return FAILURES if count["failed"] else UNTRIED if count["unknown"] else DONE


def show(checked: str, protocol: Mapping[str, Any], results: Mapping[str, Any], every: bool) -> None:
    """What failed or could not be judged, with its reason, and one line of counts; every: a table of all laws before it."""
    from rich.text import Text

    from longitude.report.table import sentences, show as display, table
    from longitude.testing.engine import STATUSES, counted

    color = dict(zip(STATUSES, COLORS, strict=True))
    waiting = Counter(result.waits_for for result in results.values())
    laws = table("law", "result", "what it claims, or why it is not applicable", words=3)
    laws.columns[2].no_wrap = False
    reasons = []
    for result in results.values():
        reason = result.reason if result.status == "not applicable" else result.claim
        reason += f" ({result.reason})" if result.status == "passed" and result.reason else ""
        laws.add_row(result.law, Text(result.status, color[result.status]), Text(reason))
        if result.status in ("failed", "unknown"):
            sentence = f"{result.law} {result.status}: {result.reason}" + f" [{result.whose}]" * bool(result.whose)
            sentence += f"; error {number(result.measured)}, at most {number(result.threshold)} allowed" * (
                result.measured is not None and result.measured > 0
            )
            if waits := waiting[result.law]:
                sentence += f"; {waits} {'test waits' if waits == 1 else 'tests wait'} for this one"
            reasons.append(Text(f"{sentences(sentence)}\n"))
            reasons[-1].stylize(color[result.status], 0, len(f"{result.law} {result.status}:"))
    counts = ", ".join(f"{n} {status}" for status, n in counted(results).items() if n or status != "unknown")
    how = ", ".join(f"{key} {value}" for key, value in protocol.items() if key != "kind" and value is not None)
    more = "" if every else "; --all prints each"
    summary = f"{checked}, {len(results)} laws: {counts}{more}" + (f" ({how})" if how else "")
    display(*[laws, ""] * every, *reasons, sentences(summary))


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if value == int(value) and abs(value) < 1e6 else f"{value:.1e}"
