"""What is wrong with a line: rules in the order of harm, each with the source that it rests on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Literal, NamedTuple

from longitude.positions.config_keys import ALL_KEYS, SCHEMAS, SHARES
from longitude.positions.scaling import Linear, Llama3, YaRN
from longitude.serving.config import BASE, LENGTH, ORIGINAL, TEXT
from longitude.serving.effective import Case, longest, new_angles
from longitude.serving.line import RENAMED

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


Rows = Iterator[tuple[str, str, str]]
"""(rule, key of the engine's sources or an address, sentence) of each finding."""
VERDICTS: dict[str, Verdict] = {
    "not known": "unknown",
    "release": "unknown",
    "short texts": "costs",
    "remark": "remark",
}
"""Verdicts of rules whose findings are not wrong."""
ORDER = ("wrong", "unknown", "costs", "remark")


def findings(case: Case) -> list[Finding]:
    """The findings on a line, the most harmful first. A release whose rules were not read makes what is wrong unknown."""
    facts, pinned = case.facts, case.line.release or case.facts.version
    rows = []
    if pinned != facts.version:
        unread = f"the text pins {facts.name} {pinned}, whose files were not read: judged by those of {facts.version}"
        rows.append(("release", "", unread))
    rows += [("refused", stop.source, f"{case.line.name} stops: {stop.what}") for stop in case.stops]
    rows += [*no_effect(case), *keys_lost(case), *other_numbers(case), *lengths(case), *others(case)]
    rows += [("not known", "", reason) for reason in case.unknown]
    sure = pinned == facts.version and not (case.unknown and case.before.kind in facts.unclear)
    usual: Verdict = "wrong" if sure else "unknown"
    made = []
    for rule, key, text in rows:
        source = facts.sources.get(key, key)
        read = f"{facts.name} {facts.version}: " if source and not source.startswith("docs/") else ""
        made.append(Finding(rule, VERDICTS.get(rule, usual), text, f"{read}{source}"))
    return sorted(made, key=lambda finding: ORDER.index(finding.verdict))


def wrong(rows: list[Finding]) -> bool:
    """Whether a finding is wrong."""
    return any(finding.verdict == "wrong" for finding in rows)


# ---- no effect, and lost keys --------------------------------------------------------------------------------------------
def no_effect(case: Case) -> Rows:
    """A scaling or a base that is asked for, or in config.json, and not used."""
    kind, factor, base = case.before.kind, case.meant.scheme.get("factor"), case.asked.keys.get(BASE)
    if not case.alone and case.asked.schemes:
        yield "no effect", "flat", "no effect: no layer of the model rotates its queries and keys"
    if case.rope is None or (case.scaling is not None and not _keeps_old(case)):
        return
    fits = 0 < (case.asked.length or 0) <= case.declared
    if kind in case.facts.unscaled and not (case.is_plain and not case.meant.scales):
        yield "no effect", case.facts.unscaled[kind], f"no effect: the class of {kind} takes no scaling"
    elif case.meant.scales and (case.longer or not (factor == 1 or (factor is None and fits))):
        rotation = "scaling of training" if case.scaling else "plain rotation"
        yield "no effect", "flat", f"no effect: the text model keeps its {rotation}; {_why(case)}"
    if isinstance(base, int | float) and case.rope.base != base:
        beside = f"rope_theta {base:,.0f} is set beside rope_parameters, whose {case.rope.base:,.0f} is used"
        yield "no effect", "flat", f"no effect: {beside}"


def _keeps_old(case: Case) -> bool:
    """Whether the engine uses the scaling of the checkpoint, and the line asks for another."""
    asked = {"rope_type": RENAMED.get(case.meant.kind, case.meant.kind), "factor": case.meant.scheme.get("factor")}
    other = any(value not in (None, case.saved.get(key)) for key, value in asked.items())
    numbers = [(type(scheme), getattr(scheme, "factor", None)) for scheme in (case.trained, case.scaling)]
    return case.meant.scales and other and numbers[0] == numbers[1]


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
        (case.meant.kind == "dynamic", "dynamic with the original length of the config leaves the base unchanged"),
        (case.scaling is None, "its rope_type is default"),
        (True, "no key of the dict reaches it"),
    )  # fmt: skip
    return next(reason for holds, reason in reasons if holds)


def keys_lost(case: Case) -> Rows:
    """The base, sections, shares and dicts by layer type of the checkpoint, or shared keys beside the latter."""
    saved, replaced = case.saved.get(BASE), any(BASE not in flat for _, flat in case.asked.schemes)
    if case.rope is not None and saved not in (None, case.rope.base) and (case.meant.scales or replaced):
        named = case.meant.scheme.get(BASE) == case.rope.base
        how = "the line gives another base" if named else "the dict has none, and the engine fills in its own"
        lost = f"{case.rope.base:,.0f} in place of the checkpoint's {saved:,.0f}; {how}"
        yield "base lost", "base", f"base lost: {lost}"
    if case.after is None or case.line.engine == "llama.cpp":
        return
    before, after = case.before.by_type, case.after.by_type
    flat = [key for key, value in case.after.parameters.items() if not isinstance(value, dict | None)]
    if None not in after and flat:
        how = "beside dicts by layer type are refused or dropped: write them into each dict"
        yield "keys lost", "lost", f"shared keys ({', '.join(flat)}) {how}"
    if len(before) > len(after):
        kinds = ", ".join(map(str, before))
        yield "keys lost", "lost", f"lost: rope parameters by layer type ({kinds}) are replaced by one dict"
    elif case.asked.schemes:
        same_share = case.rope is not None and case.rope.partial_rotary_factor == case.before.share
        for label, parameters in before.items():
            for key in ("mrope_section", *SHARES[:1] * (not same_share)):
                if parameters.get(key) not in (None, 1.0) and key not in after.get(label, {}):
                    yield "keys lost", "lost", f"lost: {key} {parameters[key]} of the checkpoint"


# ---- other numbers than meant ------------------------------------------------------------------------------------------
def other_numbers(case: Case) -> Rows:
    """Another scheme than that of training, another original length, a factor twice, another factor of cos and sin."""
    unnamed = case.line.engine == "llama.cpp" and case.is_plain and "rope_type" not in case.meant.scheme
    if isinstance(case.scaling, Linear) and unnamed:
        linear = "a scale without --rope-scaling is linear: every frequency is divided, for short texts, too"
        yield "other scheme", "type", linear
    known, scaling = case.trained, case.scaling
    if known and case.meant.scales and scaling is not None:
        originals = [getattr(scheme, "original_max_length", None) for scheme in (known, scaling)]
        if type(known) is not type(scaling) or originals[0] != originals[1]:
            before = f"{known.name} (factor {getattr(known, 'factor', '-')}, original {originals[0]})"
            replaced = f"the weights were trained with {before}, which is replaced: nothing is scaled twice"
            yield "other scheme", "type", replaced
    trained, written = case.meant.original, case.meant.scheme.get(ORIGINAL)
    used = case.yarn and case.yarn.original_max_length
    if used and trained and case.meant.scales and used > trained:
        taken = f"original length {used:,} is longer than the checkpoint's {trained:,}: the factor counts twice"
        if written != used:
            taken = f"the ramp is computed from {used:,}, and {written or 'no original length'} is written"
        yield "original length", "factor", taken
    raised = longest({key: value for key, value in case.asked.keys.items() if key != "max_model_len"}, case.declared)
    if raised is not None and not isinstance(scaling, YaRN | Llama3 | None) and case.limit > 1.01 * raised:
        again = f"{LENGTH} is raised to {raised:,}, and {case.line.name} multiplies it again, to {case.limit:,.0f}"
        yield "factor twice", "length", f"factor twice: {again}: leave it at {case.declared:,}"
    if (yarn := case.yarn) is not None:
        source = {**case.saved, **case.meant.scheme} if case.meant.scales else case.saved
        keys = {key: source[key] for key in ("attention_factor", "mscale", "mscale_all_dim") if source.get(key)}
        wanted, got = YaRN(yarn.factor, yarn.original_max_length, **keys).factors()[0], yarn.factors()[0]
        extra = case.meant.scheme.get("attn_factor") or case.asked.file.get("rope.scaling.attn_factor")
        if keys and not extra and not math.isclose(wanted, got, rel_tol=1e-3):
            multiplied = f"cos and sin are multiplied by {got:.4g} in place of {wanted:.4g}"
            yield "attention factor", "factor", f"{', '.join(keys)} not read: {multiplied}"
        if "--yarn-attn-factor" in case.asked.flags:
            instead = "use --override-kv ARCH.rope.scaling.attn_factor=float:X"
            yield "attention factor", "factor", f"--yarn-attn-factor is overwritten by the formula: {instead}"


# ---- lengths ---------------------------------------------------------------------------------------------------------
def lengths(case: Case) -> Rows:
    """Requests beyond the table or the scheme, longer ones without scaling, scaling without longer ones, cut ones."""
    tokens, declared, yarn = case.served.length, case.declared, case.yarn
    rows = case.served.rows
    far = yarn.factor * yarn.original_max_length if yarn is not None else math.inf
    if tokens > rows and not case.stops:
        read = f"pass the {rows:,.0f} positions in the table of cos and sin: the engine reads beyond its end"
        yield "too long", "rows", f"requests of {tokens:,} tokens {read}"
    elif tokens > 1.01 * far and not case.stops:
        yield "too long", "rows", f"{tokens:,} tokens are beyond factor times original length, {far:,.0f}"
    if case.rope is not None and case.scaling is None and case.longer and case.rope.base <= case.saved.get(BASE, 0):
        plain = f"{tokens:,} tokens with no scaling, and {declared:,} are declared{new_angles(case)}"
        yield "no scaling", "length", plain
    if case.scaling is not None and case.meant.scales and case.is_plain and case.limit and tokens and not case.longer:
        needless = f"scaling for nothing: requests end at {tokens:,}, and the model reads {declared:,} without it"
        yield "needless scaling", "length", needless
    asked = case.asked.length or 0
    wanted = case.served.wanted or asked or declared
    if 0 < tokens <= case.limit < wanted:
        yield "cut", "length", f"requests are cut to {tokens:,} tokens of {wanted:,}"
    elif 0 < tokens < asked:  # 0: the engine stops
        yield "remark", "", f"a request has {tokens:,} tokens: slots share {asked:,}"
    if yarn is not None and case.meant.scales and case.longer:
        yield "short texts", "docs/extending.md; spark-vllm-docker#259", MEASURED
        if far > 1.5 * tokens:
            times = f"{far / tokens:.1f} times what is served"
            yield "short texts", "factor", f"factor {yarn.factor:g} is made for {far:,.0f}: {times}"


# ---- keys, drafts, remarks ---------------------------------------------------------------------------------------------
def others(case: Case) -> Rows:
    """Keys that nothing reads, a draft model that overrides do not reach, and what is no fault."""
    scheme, asked, kind = case.meant.scheme, case.asked, case.meant.kind
    if "max_model_len" in asked.keys:
        unset = f"max_model_len among the overrides sets no length: use {case.facts.flag('length')}"
        yield "key not read", "unread", unset
    for _, flat in asked.schemes:
        for key in flat.keys() - ALL_KEYS - {"attn_factor", "extrapolation_factor", "max_trained_positions"}:
            if near := get_close_matches(key, ALL_KEYS, n=1, cutoff=0.8):
                yield "key not read", "unread", f"{key} is read by nothing: did you mean {near[0]}?"
    options = asked.draft or {}
    name = options.get("method") or options.get("model")
    if case.line.engine != "vllm":
        if asked.draft is not None and asked.schemes:
            yield "remark", "draft", "the draft model gets the same overrides: right if its original length is the same"
    elif name not in (None, "ngram", "suffix") and case.meant.scales and case.scaling and case.longer:
        plain = f"it rotates without scaling beyond {case.declared:,}; write the keys into config.json"
        yield "draft", "draft", f"the draft ({name}) gets none of --hf-overrides: {plain}"
    written = scheme.get(ORIGINAL)
    if isinstance(written, int) and written < case.declared and case.is_plain:
        two = f"{written:,} in the line, {case.declared:,} in config.json: ask the model card"
        yield "remark", "", f"two original lengths: {two}"
    if kind in RENAMED and case.line.engine != "transformers":
        yield "remark", "type", f"transformers has no rope_type {kind!r}: it is a form of {RENAMED[kind]}"
    if asked.lifted and (asked.length or 0) <= case.limit:
        yield "remark", "length", f"{case.facts.limit} lifts a limit that is not reached"
