"""What is wrong with a line: a table of rules in the order of harm, each with the source that it rests on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

from longitude.positions.config_keys import ALL_KEYS, BASES, SCHEMAS, SHARES
from longitude.positions.scaling import Linear, Llama3, YaRN
from longitude.serving.config import LENGTH, ORIGINAL, RENAMED, TEXT, Stops, merge
from longitude.serving.effective import Case, judged, longest, new_angles, reach
from longitude.serving.line import joined, lines_in

Verdict = Literal["wrong", "unknown", "costs", "remark"]
MEASURED = (
    "YaRN is static: short texts are scaled, too. In our measurement of a small Llama, extended 4 times, the score at its length "
    "length fell from 0.94 to 0.86, and bits per byte rose by 2%"
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
    """The findings on a line, the most harmful first."""
    rows = [Finding("refused", "wrong", f"{case.line.name} stops: {stop.what}", stop.source) for stop in case.stops]
    for rule in RULES:
        source = case.facts.sources.get(rule.source, rule.source)
        rows += [Finding(rule.name, rule.verdict, sentence, source) for sentence in rule.broken(case)]
    rows += [Finding("not known", "unknown", reason, "") for reason in case.unknown]
    order = ("wrong", "unknown", "costs", "remark")
    return sorted(rows, key=lambda finding: order.index(finding.verdict))


def wrong(rows: list[Finding]) -> bool:
    """Whether a finding is wrong."""
    return any(finding.verdict == "wrong" for finding in rows)


def thousands(number: float) -> str:
    return f"{number:,.0f}"


# ---- no effect -------------------------------------------------------------------------------------------------------
def no_effect(case: Case) -> Iterator[str]:
    """A scaling that is asked for, or in config.json, and not used."""
    if (
        case.rope is not None
        and case.rope.scaling is None
        and not case.asked.schemes
        and (kind := case.before.kind) in case.facts.unscaled
    ):
        if case.own.get("rope_type", "default") != "default":
            yield f"no effect: config.json has a scaling, and the class of {kind} takes none ({case.facts.unscaled[kind]})"
        return
    if case.rope is None or case.after is None or not case.meant.scales or case.rope.scaling is not None:
        return
    if isinstance(factor := case.meant.scheme.get("factor"), int | float) and factor == 1 and not _longer(case):
        return
    yield f"no effect: the text model keeps its plain rotation; {_why(case)}"


def _why(case: Case) -> str:
    """Why a scaling has no effect."""
    scheme, kind = case.meant.scheme, case.before.kind
    top = {path[0] for path, _ in case.asked.schemes}
    if kind in case.facts.unscaled:
        return f"the class of {kind} takes no scaling ({case.facts.unscaled[kind]})"
    if case.before.nested and top & {*SCHEMAS}:
        return f"the key is set on the parent config, and the text model is in {TEXT}: nest it there"
    if not case.before.nested and TEXT in top:
        return f"this model has no {TEXT}: write the key at the top"
    if isinstance(factor := scheme.get("factor"), int | float) and factor == 1:
        return "factor 1 scales nothing"
    if case.line.engine == "llama.cpp":
        return "--rope-scaling without --rope-scale leaves the scale 1"
    if "type" in scheme and "rope_type" not in scheme:
        return 'the key "type" does not replace the "rope_type" of the checkpoint: write rope_type'
    if scheme.get("rope_type") == "dynamic":
        return "dynamic with the original length of the config leaves the base unchanged"
    return "its rope_type is default"


def base_without_effect(case: Case) -> Iterator[str]:
    """A base that is set where nothing reads it."""
    base = case.asked.keys.get(BASES[0])
    if case.rope is not None and isinstance(base, int | float) and case.rope.base != base:
        yield f"no effect: rope_theta {thousands(base)} is set beside rope_parameters, whose {thousands(case.rope.base)} is used"


# ---- lost keys -------------------------------------------------------------------------------------------------------
def base_lost(case: Case) -> Iterator[str]:
    own = case.own.get(BASES[0])
    if case.rope is None or own is None or case.rope.base == own or not (case.meant.scales or _replaced(case)):
        return
    named = case.meant.scheme.get(BASES[0]) == case.rope.base
    how = "the line gives another base" if named else "the dict has none, and the engine fills in its own"
    yield f"base lost: {thousands(case.rope.base)} in place of the checkpoint's {thousands(own)}; {how}"


def _replaced(case: Case) -> bool:
    """Whether the line replaces rope parameters without a base."""
    return any(BASES[0] not in scheme for _, scheme in case.asked.schemes)


def keys_lost(case: Case) -> Iterator[str]:
    """Sections and shares of the checkpoint that the engine no longer has, and parameters by layer type."""
    if case.after is None or not case.asked.schemes:
        return
    before, after = case.before.by_type, case.after.by_type
    if len(before) > 1 and len(after) == 1:
        yield f"lost: rope parameters by layer type ({', '.join(map(str, before))}) are replaced by one dict"
        return
    for label, parameters in before.items():
        for key in ("mrope_section", SHARES[0]):
            kept = key in after.get(label, {}) or (
                key == SHARES[0] and case.rope and case.rope.partial_rotary_factor == case.before.share
            )
            if parameters.get(key) not in (None, 1.0) and not kept and case.line.engine != "llama.cpp":
                yield f"lost: {key} {parameters[key]} of the checkpoint"


def mixed(case: Case) -> Iterator[str]:
    """Shared keys beside dicts by layer type."""
    parameters = (case.after or case.before).parameters
    typed = [key for key, value in parameters.items() if isinstance(value, dict)]
    if typed and (flat := [key for key, value in parameters.items() if not isinstance(value, dict | None)]):
        yield f"shared keys ({', '.join(flat)}) beside dicts by layer type are refused or dropped: write them into each dict"


# ---- other numbers than meant ------------------------------------------------------------------------------------------
def other_scheme(case: Case) -> Iterator[str]:
    """Linear scaling in place of YaRN."""
    if case.rope is None or not isinstance(case.rope.scaling, Linear):
        return
    if (
        case.line.engine == "llama.cpp"
        and "rope_type" not in case.meant.scheme
        and case.own.get("rope_type") != "linear"
    ):
        yield "a scale without --rope-scaling is linear: every frequency is divided, for short texts, too"


def original_taken(case: Case) -> Iterator[str]:
    """An original length other than that of training."""
    if case.rope is None or not isinstance(case.rope.scaling, YaRN) or case.meant.original is None:
        return
    used, trained, given = case.rope.scaling.original_max_length, case.meant.original, case.meant.scheme.get(ORIGINAL)
    if used <= trained or not case.meant.scales:
        return
    if isinstance(given, int) and given == used:
        yield f"original length {thousands(used)} is longer than the checkpoint's {thousands(trained)}: the factor counts twice"
    elif given is None:
        yield f"no original length: the engine takes {thousands(used)} in place of {thousands(trained)}"
    else:
        yield f"the ramp is computed from {thousands(used)}, and {thousands(given)} is written"


def factor_twice(case: Case) -> Iterator[str]:
    """The length raised by hand where the engine multiplies it as well."""
    declared, raised = case.before.declared, longest_key(case)
    if case.served is None or case.served.limit is None or declared is None or raised is None or case.rope is None:
        return
    if (
        not isinstance(case.rope.scaling, YaRN | Llama3)
        and case.rope.scaling is not None
        and case.served.limit > 1.01 * raised
    ):
        limit = thousands(case.served.limit)
        yield (
            f"factor twice: {LENGTH} is raised to {thousands(raised)}, and {case.line.name} multiplies it again, to {limit}: "
            f"leave {LENGTH} at {thousands(declared)}"
        )


def longest_key(case: Case) -> int | None:
    return longest(
        {key: value for key, value in case.asked.keys.items() if key != "max_model_len"}, case.before.declared
    )


def attention_factor(case: Case) -> Iterator[str]:
    """A factor of cos and sin other than transformers computes for the same keys."""
    if case.rope is None or not isinstance(scaling := case.rope.scaling, YaRN) or case.after is None:
        return
    source = {**case.own, **case.meant.scheme} if case.meant.scales else case.own
    keys = {key: source[key] for key in ("attention_factor", "mscale", "mscale_all_dim") if source.get(key)}
    wanted, used = YaRN(scaling.factor, scaling.original_max_length, **keys).factors()[0], scaling.factors()[0]
    extra = case.meant.scheme.get("attn_factor") or case.asked.flags.get("rope.scaling.attn_factor")
    if keys and not extra and not math.isclose(wanted, used, rel_tol=1e-3):
        yield f"{', '.join(keys)} not read: cos and sin are multiplied by {used:.4g} in place of {wanted:.4g}"
    if case.asked.flags.get("--yarn-attn-factor") is not None:
        yield "--yarn-attn-factor is overwritten by the formula: use --override-kv ARCH.rope.scaling.attn_factor=float:X"


def replaced_scaling(case: Case) -> Iterator[str]:
    """The scaling that the weights were trained with, replaced by another."""
    trained = case.alone.get(case.full, case.alone.get(None))
    if (
        case.rope is None
        or trained is None
        or trained.scaling is None
        or not case.meant.scales
        or case.rope.scaling is None
    ):
        return
    a, b = trained.scaling, case.rope.scaling
    if type(a) is not type(b) or getattr(a, "original_max_length", None) != getattr(b, "original_max_length", None):
        known = f"{a.name} (factor {getattr(a, 'factor', '-')}, original {getattr(a, 'original_max_length', '-')})"
        yield f"the weights were trained with {known}, which is replaced: nothing is scaled twice"


# ---- lengths ---------------------------------------------------------------------------------------------------------
def beyond_rows(case: Case) -> Iterator[str]:
    served = case.served
    if served and not case.stops and served.rows and served.length and served.length > served.rows:
        yield (
            f"requests of {thousands(served.length)} tokens pass the {thousands(served.rows)} rows of cos and sin: positions are "
            f"read out of range"
        )


def beyond_reach(case: Case) -> Iterator[str]:
    if (
        case.rope is None
        or not case.tokens
        or not isinstance(case.rope.scaling, YaRN)
        or (far := reach(case.rope)) is None
    ):
        return
    if (
        case.tokens > 1.01 * far
        and not case.stops
        and not (case.served and case.served.rows and case.tokens > case.served.rows)
    ):
        yield f"{thousands(case.tokens)} tokens are beyond factor times original length, {thousands(far)}"


def unscaled(case: Case) -> Iterator[str]:
    """A length beyond the declared one, and a plain rotation."""
    declared = case.before.declared
    if (
        case.rope is None
        or case.rope.scaling is not None
        or not declared
        or not _longer(case)
        or case.rope.base > case.own.get(BASES[0], 0)
    ):
        return
    width = case.before.text.get("head_dim") or (case.before.text.get("hidden_size") or 0) // (
        case.before.text.get("num_attention_heads") or 1
    )
    pairs = ""
    if isinstance(width, int) and width > 1:
        slow, every = new_angles(case.rope, declared, width)
        pairs = f": {slow} of {every} pairs meet angles that training never showed"
    yield f"{thousands(case.tokens or 0)} tokens with no scaling, and {thousands(declared)} are declared{pairs}"


def _longer(case: Case) -> bool:
    return bool(case.tokens and case.before.declared and case.tokens > 1.001 * case.before.declared)


def needless(case: Case) -> Iterator[str]:
    """A scaling, and no longer text."""
    declared = case.before.declared
    if case.rope is None or case.rope.scaling is None or not case.meant.scales or not declared or not case.tokens:
        return
    if case.served is None or case.served.limit is None:
        return  # requests may be longer
    if case.own.get("rope_type", "default") == "default" and case.tokens <= 1.001 * declared:
        at = thousands(case.tokens)
        yield f"every text is scaled, and requests end at {at}, which the checkpoint has without scaling ({thousands(declared)})"


def cut(case: Case) -> Iterator[str]:
    """Requests shorter than asked for."""
    served, asked = case.served, case.asked
    if served is None or served.length is None:
        return
    wanted = served.wanted or asked.length or case.before.declared
    if wanted and served.limit is not None and served.limit < wanted and served.length <= served.limit:
        yield f"requests are cut to {thousands(served.length)} tokens of {thousands(wanted)}"


def shared(case: Case) -> Iterator[str]:
    """Slots that share a cache."""
    if case.tokens and case.asked.length and case.tokens < case.asked.length and not [*cut(case)]:
        yield f"a request has {thousands(case.tokens)} tokens: slots share {thousands(case.asked.length)}"


# ---- keys, drafts, costs -----------------------------------------------------------------------------------------------
def unread(case: Case) -> Iterator[str]:
    """Keys that nothing reads, and misspelt ones."""
    if "max_model_len" in case.asked.keys:
        yield f"max_model_len among the overrides sets no length: use {case.engine.LENGTH_FLAG}"
    for _, scheme in case.asked.schemes:
        for key in scheme.keys() - ALL_KEYS - {"attn_factor", "extrapolation_factor", "max_trained_positions"}:
            if near := get_close_matches(key, ALL_KEYS, n=1, cutoff=0.8):
                yield f"{key} is read by nothing: did you mean {near[0]}?"


def draft(case: Case) -> Iterator[str]:
    """A draft model that the overrides of vLLM do not reach."""
    asked = case.asked
    if (
        case.line.engine == "vllm"
        and asked.draft
        and case.rope
        and case.rope.scaling
        and asked.schemes
        and _longer(case)
    ):
        if asked.draft.get("method") in ("ngram", "suffix") or not ({"method", "model"} & asked.draft.keys()):
            return
        yield (
            f"the draft ({asked.draft.get('method') or asked.draft.get('model')}) gets none of --hf-overrides: it rotates "
            f"without scaling beyond {thousands(case.before.declared or 0)}; write the keys into config.json"
        )


def draft_too(case: Case) -> Iterator[str]:
    if case.line.engine in ("sglang", "llama.cpp") and case.asked.draft is not None and case.asked.schemes:
        yield "the draft model gets the same overrides: right if its original length is the same"


def costs(case: Case) -> Iterator[str]:
    if case.rope is None or not isinstance(case.rope.scaling, YaRN) or not case.meant.scales or not _longer(case):
        return
    far = reach(case.rope) or 0
    yield MEASURED
    if case.tokens and far > 1.5 * case.tokens:
        yield f"factor {case.rope.scaling.factor:g} is made for {thousands(far)}: {far / case.tokens:.1f} times what is served"


def two_originals(case: Case) -> Iterator[str]:
    declared, given = case.before.declared, case.meant.scheme.get(ORIGINAL)
    if isinstance(given, int) and declared and given < declared and case.own.get("rope_type", "default") == "default":
        yield f"two original lengths: {thousands(given)} in the line, {thousands(declared)} in config.json: ask the model card"


def names(case: Case) -> Iterator[str]:
    kind = case.meant.scheme.get("rope_type", case.meant.scheme.get("type"))
    if isinstance(kind, str) and kind in RENAMED and case.line.engine != "transformers":
        yield f"transformers has no rope_type {kind!r}: there it is a form of {RENAMED[kind]}"


def idle_variable(case: Case) -> Iterator[str]:
    if case.asked.lifted and case.served and case.served.limit and (case.asked.length or 0) <= case.served.limit:
        yield f"{case.facts.limit} lifts a limit that is not reached"


def margin(case: Case) -> Iterator[str]:
    if (
        case.line.engine == "sglang"
        and case.rope
        and isinstance(case.rope.scaling, Linear)
        and case.tokens == (case.served and case.served.limit)
    ):
        yield "rows that SGLang appends beyond the length, 256 and those of a draft, are not scaled (sglang#35171)"


RULES = (
    Rule("no effect", "wrong", no_effect, "flat"),
    Rule("no effect", "wrong", base_without_effect, "unread"),
    Rule("base lost", "wrong", base_lost, "base"),
    Rule("keys lost", "wrong", keys_lost, "lost"),
    Rule("shared keys", "wrong", mixed, "vllm#57623"),
    Rule("other scheme", "wrong", other_scheme, "type"),
    Rule("original length", "wrong", original_taken, "factor"),
    Rule("factor twice", "wrong", factor_twice, "length"),
    Rule("scaling replaced", "wrong", replaced_scaling, "lost"),
    Rule("beyond the table", "wrong", beyond_rows, "rows"),
    Rule("beyond the scaling", "wrong", beyond_reach, "factor"),
    Rule("no scaling", "wrong", unscaled, "length"),
    Rule("attention factor", "wrong", attention_factor, "factor"),
    Rule("needless scaling", "wrong", needless, "length"),
    Rule("cut", "wrong", cut, "length"),
    Rule("key not read", "wrong", unread, "unread"),
    Rule("draft", "wrong", draft, "draft"),
    Rule("draft", "remark", draft_too, "draft"),
    Rule("short texts", "costs", costs, "docs/extending.md; spark-vllm-docker#259"),
    Rule("slots", "remark", shared, "length"),
    Rule("two lengths", "remark", two_originals, ""),
    Rule("name", "remark", names, ""),
    Rule("variable", "remark", idle_variable, "length"),
    Rule("margin", "remark", margin, "rows"),
)
"""Rules in the order of harm."""


# ---- the corrected line ------------------------------------------------------------------------------------------------
def corrected(case: Case) -> tuple[str | None, str]:
    """(the line to paste, or None; why there is none)."""
    engine, length, parameters = case.engine, case.meant.length or case.before.declared, case.meant.parameters
    add: dict[str, Any] = {}
    try:
        if parameters != case.before.parameters and length:
            add = engine.line(case.before, parameters, length)
        elif engine.LENGTH_FLAG and case.asked.length:
            add = {engine.LENGTH_FLAG: str(min(case.asked.length, case.before.declared or case.asked.length))}
    except Stops as stop:
        return None, f"{stop.what} ({stop.source})"
    flag = getattr(engine, "JSON_FLAG", None)
    if flag and (others := _others(case.asked.keys)):
        merge(others, add.get(flag, {}))
        add |= {flag: others}
    line = joined(case.line, engine.REPLACED, add)
    again = findings(judged(lines_in(line)[0], case.before, case.alone))
    if faults := [finding.text for finding in again if finding.verdict == "wrong"]:
        return None, faults[0]
    return line, ""


def _others(keys: dict[str, Any]) -> dict[str, Any]:
    """Overridden keys that are not about positions."""
    about = (*SCHEMAS, *BASES, *SHARES, LENGTH, "max_model_len")
    kept = {
        key: _others(value) if isinstance(value, dict) else value for key, value in keys.items() if key not in about
    }
    return {key: value for key, value in kept.items() if value != {}}
