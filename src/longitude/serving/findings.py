"""What is wrong with a line: a table of rules in the order of harm, each with the source that it rests on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Literal, NamedTuple

from longitude.positions.config_keys import ALL_KEYS, SCHEMAS, SHARES
from longitude.positions.scaling import Linear, Llama3, YaRN
from longitude.serving.config import BASE, LENGTH, ORIGINAL, RENAMED, TEXT
from longitude.serving.effective import Case, longest, new_angles

Verdict = Literal["wrong", "unknown", "costs", "remark"]
MEASURED = (
    "YaRN is static: short texts are scaled, too. In our measurement of a small Llama, extended 4 times, the score at the "
    "training length fell from 0.94 to 0.86, and bits per byte rose by 2%"
)


class Finding(NamedTuple):
    """A finding.

    Attributes:
        rule: Name of the rule.
        verdict: "wrong", "unknown" (cannot be judged), "costs" (right, at a cost) or "remark".
        text: The fault with its numbers.
        source: The file or thread that it rests on.
    """

    rule: str
    verdict: Verdict
    text: str
    source: str


class Rule(NamedTuple):
    """A rule.

    Attributes:
        name: Its name.
        verdict: What its findings are.
        broken: Yields a sentence for each finding.
        source: The key of the engine's SOURCES, or an address.
    """

    name: str
    verdict: Verdict
    broken: Callable[[Case], Iterator[str]]
    source: str = ""


def findings(case: Case) -> list[Finding]:
    """The findings on a line, the most harmful first. A release whose rules were not read makes what is wrong unknown."""
    rows = [Finding("refused", "wrong", f"{case.line.name} stops: {stop.what}", stop.source) for stop in case.stops]
    for rule in RULES:
        source = case.facts.sources.get(rule.source, rule.source)
        rows += [Finding(rule.name, rule.verdict, sentence, source) for sentence in rule.broken(case)]
    rows += [Finding("not known", "unknown", reason, "") for reason in case.unknown]
    pinned = case.line.release or case.facts.version
    if pinned != case.facts.version or (case.unknown and case.before.kind in case.facts.unclear):
        rows = [row._replace(verdict="unknown") if row.verdict == "wrong" else row for row in rows]
    if pinned != case.facts.version:
        other = f"the text pins {pinned}, which was not read: judged by {case.facts.version}"
        rows.append(Finding("release", "unknown", other, ""))
    order = ("wrong", "unknown", "costs", "remark")
    return sorted(rows, key=lambda finding: order.index(finding.verdict))


def wrong(rows: list[Finding]) -> bool:
    """Whether a finding is wrong."""
    return any(finding.verdict == "wrong" for finding in rows)


# ---- no effect, and lost keys --------------------------------------------------------------------------------------------
def no_effect(case: Case) -> Iterator[str]:
    """A scaling or a base that is asked for, or in config.json, and not used."""
    kind, factor = case.before.kind, case.meant.scheme.get("factor")
    if not case.alone and case.asked.schemes:
        yield "no effect: no layer of the model rotates its queries and keys"
    if case.rope is None or (case.scaling is not None and not _keeps_old(case)):
        return
    if kind in case.facts.unscaled and not (case.is_plain and not case.meant.scales):
        yield f"no effect: the class of {kind} takes no scaling ({case.facts.unscaled[kind]})"
    elif case.meant.scales and (case.longer or not (factor == 1 or (factor is None and _fits(case)))):
        rotation = "scaling of training" if case.scaling else "plain rotation"
        yield f"no effect: the text model keeps its {rotation}; {_why(case)}"
    base = case.asked.keys.get(BASE)
    if isinstance(base, int | float) and case.rope.base != base:
        yield f"no effect: rope_theta {base:,.0f} is set beside rope_parameters, whose {case.rope.base:,.0f} is used"


def _keeps_old(case: Case) -> bool:
    """Whether the engine uses the scaling of the checkpoint, and the line asks for another."""
    kind, factor = case.meant.scheme.get("rope_type", case.meant.scheme.get("type")), case.meant.scheme.get("factor")
    asked = {"rope_type": RENAMED.get(str(kind), kind), "factor": factor}
    other = any(value not in (None, case.saved.get(key)) for key, value in asked.items())
    numbers = [(type(scheme), getattr(scheme, "factor", None)) for scheme in (case.trained, case.scaling)]
    return case.meant.scales and other and numbers[0] == numbers[1]


def _fits(case: Case) -> bool:
    """Whether the length that the line asks for needs no scaling."""
    return 0 < (case.asked.length or 0) <= case.declared


def _why(case: Case) -> str:
    """Why a scaling has no effect."""
    scheme, top = case.meant.scheme, {path[0] for path, _ in case.asked.schemes}
    reasons = (
        (case.before.nested and top & {*SCHEMAS} and case.line.engine != "llama.cpp",
         f"the key is set on the parent config, and the text model is in {TEXT}: nest it there"),
        (not case.before.nested and TEXT in top, f"this model has no {TEXT}: write the key at the top"),
        (scheme.get("factor") == 1, "factor 1 scales nothing"),
        (case.line.engine == "llama.cpp", "--rope-scaling without --rope-scale leaves the scale 1"),
        ("type" in scheme and "rope_type" not in scheme,
         'the key "type" does not replace the "rope_type" of the checkpoint: write rope_type'),
        (scheme.get("rope_type") == "dynamic", "dynamic with the original length of the config leaves the base unchanged"),
        (case.scaling is None, "its rope_type is default"),
        (True, "no key of the dict reaches it"),
    )  # fmt: skip
    return next(reason for holds, reason in reasons if holds)


def base_lost(case: Case) -> Iterator[str]:
    saved, scheme = case.saved.get(BASE), case.meant.scheme
    replaced = any(BASE not in flat for _, flat in case.asked.schemes)
    if case.rope is not None and saved not in (None, case.rope.base) and (case.meant.scales or replaced):
        named = scheme.get(BASE) == case.rope.base
        how = "the line gives another base" if named else "the dict has none, and the engine fills in its own"
        yield f"base lost: {case.rope.base:,.0f} in place of the checkpoint's {saved:,.0f}; {how}"


def keys_lost(case: Case) -> Iterator[str]:
    """Sections, shares and dicts by layer type of the checkpoint, or shared keys beside the latter."""
    if case.after is None or case.line.engine == "llama.cpp":
        return
    before, after = case.before.by_type, case.after.by_type
    flat = [key for key, value in case.after.parameters.items() if not isinstance(value, dict | None)]
    if None not in after and flat:
        yield f"shared keys ({', '.join(flat)}) beside dicts by layer type are refused or dropped: write them into each dict"
    if len(before) > len(after):
        yield f"lost: rope parameters by layer type ({', '.join(map(str, before))}) are replaced by one dict"
    elif case.asked.schemes:
        same_share = case.rope is not None and case.rope.partial_rotary_factor == case.before.share
        for label, parameters in before.items():
            for key in ("mrope_section", *SHARES[:1] * (not same_share)):
                if parameters.get(key) not in (None, 1.0) and key not in after.get(label, {}):
                    yield f"lost: {key} {parameters[key]} of the checkpoint"


# ---- other numbers than meant ------------------------------------------------------------------------------------------
def other_scheme(case: Case) -> Iterator[str]:
    """Linear scaling that nobody named, or another scheme than that of training."""
    unnamed = case.line.engine == "llama.cpp" and case.is_plain and "rope_type" not in case.meant.scheme
    if isinstance(case.scaling, Linear) and unnamed:
        yield "a scale without --rope-scaling is linear: every frequency is divided, for short texts, too"
    known = case.trained
    if known and case.meant.scales and case.scaling is not None:
        originals = [getattr(scheme, "original_max_length", None) for scheme in (known, case.scaling)]
        if type(known) is not type(case.scaling) or originals[0] != originals[1]:
            before = f"{known.name} (factor {getattr(known, 'factor', '-')}, original {originals[0]})"
            yield f"the weights were trained with {before}, which is replaced: nothing is scaled twice"


def original_taken(case: Case) -> Iterator[str]:
    """An original length beyond that of training."""
    trained, written = case.meant.original, case.meant.scheme.get(ORIGINAL)
    if case.yarn is None or trained is None or not case.meant.scales or case.yarn.original_max_length <= trained:
        return
    used = case.yarn.original_max_length
    if written is None:
        yield f"no original length: the engine takes {used:,} in place of {trained:,}"
    elif written == used:
        yield f"original length {used:,} is longer than the checkpoint's {trained:,}: the factor counts twice"
    else:
        yield f"the ramp is computed from {used:,}, and {written:,} is written"


def factor_twice(case: Case) -> Iterator[str]:
    """The length raised by hand where the engine multiplies it as well."""
    raised = longest({key: value for key, value in case.asked.keys.items() if key != "max_model_len"}, case.declared)
    if raised is not None and not isinstance(case.scaling, YaRN | Llama3 | None) and case.limit > 1.01 * raised:
        again = f"{LENGTH} is raised to {raised:,}, and {case.line.name} multiplies it again, to {case.limit:,.0f}"
        yield f"factor twice: {again}: leave it at {case.declared:,}"


def attention_factor(case: Case) -> Iterator[str]:
    """A factor of cos and sin other than transformers computes for the same keys."""
    if (scaling := case.yarn) is None:
        return
    source = {**case.saved, **case.meant.scheme} if case.meant.scales else case.saved
    keys = {key: source[key] for key in ("attention_factor", "mscale", "mscale_all_dim") if source.get(key)}
    wanted, used = YaRN(scaling.factor, scaling.original_max_length, **keys).factors()[0], scaling.factors()[0]
    extra = case.meant.scheme.get("attn_factor") or case.asked.file.get("rope.scaling.attn_factor")
    if keys and not extra and not math.isclose(wanted, used, rel_tol=1e-3):
        yield f"{', '.join(keys)} not read: cos and sin are multiplied by {used:.4g} in place of {wanted:.4g}"
    if "--yarn-attn-factor" in case.asked.flags:
        yield "--yarn-attn-factor is overwritten by the formula: use --override-kv ARCH.rope.scaling.attn_factor=float:X"


# ---- lengths ---------------------------------------------------------------------------------------------------------
def beyond(case: Case) -> Iterator[str]:
    """Requests beyond the table, or beyond the scheme."""
    rows = (case.served.rows if case.served else None) or math.inf
    far = case.yarn.factor * case.yarn.original_max_length if case.yarn is not None else math.inf
    if case.tokens > rows and not case.stops:
        yield f"requests of {case.tokens:,} tokens pass the {rows:,.0f} rows of cos and sin: positions are read out of range"
    elif case.tokens > 1.01 * far and not case.stops:
        yield f"{case.tokens:,} tokens are beyond factor times original length, {far:,.0f}"


def unscaled(case: Case) -> Iterator[str]:
    """A length beyond the declared one, and a plain rotation."""
    if case.rope is not None and case.scaling is None and case.longer and case.rope.base <= case.saved.get(BASE, 0):
        yield f"{case.tokens:,} tokens with no scaling, and {case.declared:,} are declared{new_angles(case)}"


def needless(case: Case) -> Iterator[str]:
    """A scaling, and no longer text, in an engine with a limit."""
    if (
        case.scaling is not None
        and case.meant.scales
        and case.is_plain
        and case.limit
        and case.tokens > 0
        and not case.longer
    ):
        yield f"every text is scaled, and requests end at {case.tokens:,}: {case.declared:,} need no scaling"


def cut(case: Case) -> Iterator[str]:
    """Requests shorter than asked for."""
    wanted = (case.served and case.served.wanted) or case.asked.length or case.declared
    if 0 < case.tokens <= case.limit < wanted:
        yield f"requests are cut to {case.tokens:,} tokens of {wanted:,}"


# ---- keys, drafts, costs -----------------------------------------------------------------------------------------------
def unread(case: Case) -> Iterator[str]:
    """Keys that nothing reads, and misspelt ones."""
    if "max_model_len" in case.asked.keys:
        yield f"max_model_len among the overrides sets no length: use {case.facts.flag('length')}"
    for _, scheme in case.asked.schemes:
        for key in scheme.keys() - ALL_KEYS - {"attn_factor", "extrapolation_factor", "max_trained_positions"}:
            if near := get_close_matches(key, ALL_KEYS, n=1, cutoff=0.8):
                yield f"{key} is read by nothing: did you mean {near[0]}?"


def draft(case: Case) -> Iterator[str]:
    """A draft model that the overrides of vLLM do not reach."""
    options = case.asked.draft or {}
    name = options.get("method") or options.get("model")
    if (
        case.line.engine == "vllm"
        and name not in (None, "ngram", "suffix")
        and case.meant.scales
        and case.scaling
        and case.longer
    ):
        beyond_it = f"it rotates without scaling beyond {case.declared:,}; write the keys into config.json"
        yield f"the draft ({name}) gets none of --hf-overrides: {beyond_it}"


def costs(case: Case) -> Iterator[str]:
    if case.yarn is not None and case.meant.scales and case.longer:
        yield MEASURED
        if (far := case.yarn.factor * case.yarn.original_max_length) > 1.5 * case.tokens:
            yield f"factor {case.yarn.factor:g} is made for {far:,.0f}: {far / case.tokens:.1f} times what is served"


def remarks(case: Case) -> Iterator[str]:
    """What is no fault."""
    scheme, asked = case.meant.scheme, case.asked
    kind, written = scheme.get("rope_type", scheme.get("type")), scheme.get(ORIGINAL)
    if asked.draft is not None and asked.schemes and case.line.engine != "vllm":
        yield "the draft model gets the same overrides: right if its original length is the same"
    if asked.length and 0 < case.tokens < asked.length and not [*cut(case)]:  # 0: the engine stops
        yield f"a request has {case.tokens:,} tokens: slots share {asked.length:,}"
    if isinstance(written, int) and written < case.declared and case.is_plain:
        yield f"two original lengths: {written:,} in the line, {case.declared:,} in config.json: ask the model card"
    if isinstance(kind, str) and kind in RENAMED and case.line.engine != "transformers":
        yield f"transformers has no rope_type {kind!r}: it is a form of {RENAMED[kind]}"
    if asked.lifted and (asked.length or 0) <= case.limit:
        yield f"{case.facts.limit} lifts a limit that is not reached"


RULES = (
    Rule("no effect", "wrong", no_effect, "flat"),
    Rule("base lost", "wrong", base_lost, "base"),
    Rule("keys lost", "wrong", keys_lost, "lost"),
    Rule("other scheme", "wrong", other_scheme, "type"),
    Rule("original length", "wrong", original_taken, "factor"),
    Rule("factor twice", "wrong", factor_twice, "length"),
    Rule("too long", "wrong", beyond, "rows"),
    Rule("no scaling", "wrong", unscaled, "length"),
    Rule("attention factor", "wrong", attention_factor, "factor"),
    Rule("needless scaling", "wrong", needless, "length"),
    Rule("cut", "wrong", cut, "length"),
    Rule("key not read", "wrong", unread, "unread"),
    Rule("draft", "wrong", draft, "draft"),
    Rule("short texts", "costs", costs, "docs/extending.md; spark-vllm-docker#259"),
    Rule("remark", "remark", remarks),
)
"""Rules in the order of harm."""
