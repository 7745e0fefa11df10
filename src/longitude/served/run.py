"""Try the laws of a server: connect, ask, judge."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from longitude.errors import UsageError
from longitude.measure.endpoint import Endpoint
from longitude.measure.plan import tokenizer_for
from longitude.measure.retrieval.prompts import encode
from longitude.measure.transport import Refused, Unreachable, post
from longitude.measure.windows import Reader
from longitude.runs.store import Store
from longitude.served.calls import NEW_TOKENS, SLACK, Call, Served
from longitude.served.laws import CALLS, PATTERNS, lengths_of, suspects
from longitude.testing.engine import Law, OnLaw, Result, Unknown, try_laws

VERB = "check"
BEYOND = 1.125
"""Tokens of a prompt that is too long, over those that the server declares."""
DECLARED = ("max_model_len", "context_length", "n_ctx")
"""Names of the most tokens, answer included, in a list of models: of vLLM and SGLang, of others, of llama.cpp."""
MOST = 2**24
"""Tokens that a server may declare; prompts of more would fill the memory."""


def connect(
    server: Endpoint,
    out: Path,
    *,
    tokenizer: str | None = None,
    length: int | None = None,
    reference: str | None = None,
    trials: int = 1,
    seed: int | None = None,
) -> Served:
    """A server that is asked a word, and what laws need of it.

    Args:
        server: The server.
        out: Run directory, where calls are kept.
        tokenizer: Folder or hub name of the model's tokenizer; None: the server's own routes.
        length: The most tokens of a prompt; None: as many as the server declares.
        reference: Folder or hub name of the same model, whose log-probabilities the server must give.
        trials: Calls of a cell, over the fewest.
        seed: Of texts and numbers; None: another one in each run directory, so that no prompt is in the server's cache.

    Raises:
        UsageError: It does not answer, or declares no length.
    """
    model_tokenizer, _ = tokenizer_for(server, tokenizer or reference)
    server = server.checked(None, model_tokenizer.bos_token_id, model_tokenizer, True)
    store = Store(out)
    store.require_place(VERB)
    saved = store.question() or {}
    text_seed = seed if seed is not None else saved.get("seed", secrets.randbelow(2**31))
    store.ask(VERB, {"url": server.url, "model": server.model, "seed": text_seed})
    declared = declared_by(server)
    if length is None and declared is None:
        raise UsageError("--length", "the most tokens that the server takes, which it does not say", "none")
    served = Served(server, model_tokenizer, 0, None, 0, False, store, trials, text_seed)
    served.added = added_by(served)
    most = declared and declared - max(0, served.added) - NEW_TOKENS - server.thinking - SLACK
    served.longest = min(size for size in (length, most) if size is not None)
    served.beyond = round(BEYOND * declared) if declared and served.longest == most else None
    served.echoes = echoes(served)
    if reference is not None:
        if not served.echoes:
            expected = "a server whose completions give log-probabilities of a prompt, with echo"
            raise UsageError("--reference", expected, server.url, "leave --reference out")
        served.reference = reference_of(reference)
    return served


def declared_by(server: Endpoint) -> int | None:
    """The most tokens of a prompt with its answer that the server says it takes; None if it does not say."""
    try:
        listed = post(f"{server.url}/models", None, server.timeout)
        entries = [entry for entry in listed["data"] if entry.get("id") == server.model]
        sizes = [(entry | (entry.get("meta") or {})).get(name) for entry in entries for name in DECLARED]
    except (Refused, Unreachable, AttributeError, KeyError, TypeError):
        return None
    return next((size for size in sizes if type(size) is int and 0 < size <= MOST), None)


def added_by(served: Served) -> int:
    """Tokens that the server adds to a prompt; 0 if it does not count."""
    if not served.server.chat:
        return 0
    text = "Hello"
    _, read = served.server.counted("chat/completions", messages=[{"role": "user", "content": text}], max_tokens=1)
    return 0 if read is None or read > MOST else read - len(encode(served.tokenizer, text))


def echoes(served: Served) -> bool:
    """Whether completions give log-probabilities of a prompt."""
    try:
        ids = served.ids_of(Call(law="", length=16))
        return len(served.server.nats(ids, served.tokenizer, served.tokenizer.bos_token_id)) == len(ids) - 1
    except Refused:
        return False


def reference_of(name: str) -> Callable[[Sequence[int]], list[float]]:
    """-ln p of token ids by a checkpoint."""
    from longitude.checkpoints.load import load

    model = load(name, tokenizer=False).model.eval()

    @torch.no_grad()
    def nats(ids: Sequence[int]) -> list[float]:
        if max(ids) >= (size := model.config.get_text_config().vocab_size):
            raise Unknown(
                f"the reference has {size} tokens, and the tokenizer gives token {max(ids)}: they are of two models"
            )
        return Reader(model).losses(torch.tensor([[*ids]]), 0)[0].tolist()

    return nats


def calls_of(served: Served, laws: Sequence[Law]) -> dict[str, list[list[Call]]]:
    """The calls of each law."""
    return {law.name: [[*group] for group in CALLS[law.name](served)] for law in laws}


def check(served: Served, laws: Sequence[Law], on_law: OnLaw, on_call: Callable[[], object]) -> dict[str, Result]:
    """Ask the calls of the laws, then judge their answers. UsageError if the server stops answering."""
    for law, groups in calls_of(served, laws).items():
        on_law(law, 0, 1)
        served.answered[law] = served.ask(groups, on_call)
        again = suspects(served, law) if law in PATTERNS else []
        served.confirmed[law] = {pattern.name: served.ask([group]) for pattern, group in again}
    return try_laws(laws, served)


def costs(served: Served, laws: Sequence[Law]) -> list[tuple[str, int, int, float]]:
    """(law, calls, tokens read, seconds) of each law, by the time of two calls, a short one and a longer one."""
    lengths = lengths_of(served)
    short, long = (
        served.ask([[Call(law="plan", length=n, places=(served.place(n, 0.5),))]])[0].answer
        for n in (lengths[0], lengths[-1])
    )
    if refused := short.refused or long.refused:
        raise UsageError("--plan", "a server that answers two questions, whose time is that of others", refused)
    per_token = max(0.0, long.seconds - short.seconds) / max(1, long.sent - short.sent)
    fixed = max(0.0, short.seconds - per_token * short.sent)
    rows = []
    for name, groups in calls_of(served, laws).items():
        at_once = [min(len(group), served.server.concurrency) for group in groups]
        seconds = sum(
            (fixed + per_token * call.length) / times for group, times in zip(groups, at_once) for call in group
        )
        calls = [call for group in groups for call in group]
        rows.append((name, len(calls), sum(call.length for call in calls), seconds))
    return rows
