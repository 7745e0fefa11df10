"""A request to a server that is not trusted: no redirect is followed, and time and size of the whole answer have limits."""

from __future__ import annotations

import json
import os
import time
from http.client import HTTPException, IncompleteRead
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from longitude.errors import UsageError, one_line_of
from longitude.runs.files import parsed_json
from longitude.runs.machine import within

KEY = "OPENAI_API_KEY"
"""Variable of the environment with the server's key, if it asks for one."""
ATTEMPTS, PAUSE = 6, 0.5
"""How often a request is sent, and seconds before the second time; they double."""
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
"""HTTP codes after which the same request is sent again."""
LEAST_BYTES, BYTES_A_BYTE = 2**20, 256
"""Largest answer: so many bytes, and so many for each byte of the request. A token id of 5 bytes is echoed in about 200."""
SHOWN_BYTES = 2**16
"""Part of an error's answer that is read."""
SUCH = "an OpenAI-compatible server, such as http://localhost:8000/v1"


class Refused(RuntimeError):
    """The server answers, but not with what was asked for. code: the HTTP status, if that is an error."""

    def __init__(self, problem: str, code: int | None = None):
        super().__init__(problem)
        self.code = code


class Unreachable(RuntimeError):
    """The server does not answer."""


class NoRedirects(HTTPRedirectHandler):
    """Raises Refused for a redirect: it would carry the key to a host that the user did not name."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: Any, headers: Any) -> Any:
        fp.close()
        where = in_one_line(str(headers.get("Location")).encode())
        remedy = "no redirect is followed; name that address if you trust it"
        raise Refused(f"HTTP {code} leads to {where}, and {remedy}", code)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


OPENER = build_opener(NoRedirects)


def address(url: str) -> str:
    """An address up to /v1. UsageError if it is not one of a host by http or https."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
        known = known and (parts.port or 1) > 0  # a port that is no number raises ValueError
    except ValueError:
        known = False
    if not known:
        raise UsageError("--endpoint", SUCH, url)
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def post(url: str, content: dict[str, Any] | None, timeout: float) -> Any:
    """The JSON that a server answers, within `timeout` seconds. Refused or Unreachable if there is none after ATTEMPTS.

    content: of the request; None: it is GET.
    """
    body = None if content is None else json.dumps(content).encode()
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY)) else {}
    problem: Refused | Unreachable | None = None
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            # A socket's own limit begins again with each packet.
            answer = within(timeout, lambda: exchange(Request(url, body, headers), timeout))
        except Refused as error:
            problem = Refused(f"{url}: {error}", error.code)
            if error.code not in AGAIN:
                break
        except (OSError, HTTPException) as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):  # it would wait as long again
                raise Unreachable(f"{url}: no whole answer in {timeout:g} s") from None
            problem = Unreachable(f"{url}: {_cause(error)}")
        else:
            try:
                return parsed_json(answer)
            except ValueError as error:
                why = f"JSON that is {error}" if "nested" in str(error) else "another answer"
                raise Refused(f"{url}: expected JSON, got {why}") from None
    assert problem is not None
    raise problem


def exchange(request: Request, timeout: float) -> bytes:
    """Send a request, and read the answer. Refused for an HTTP error, a redirect, and an answer that is too long."""
    assert isinstance(request.data, bytes | None)
    most = LEAST_BYTES + BYTES_A_BYTE * len(request.data or b"")
    try:
        with OPENER.open(request, timeout=timeout) as answer:
            declared = answer.headers.get("Content-Length", "")
            expected = int(declared) if declared.isdecimal() else 0
            content = b"" if expected > most else answer.read(most + 1)
            if 0 < len(content) < expected:
                raise IncompleteRead(content, expected - len(content))
    except HTTPError as error:
        with error:
            told = in_one_line(error.read(SHOWN_BYTES)) or error.reason
        raise Refused(f"HTTP {error.code}, {told}", error.code) from None
    if not content or len(content) > most:
        raise Refused(f"expected an answer of 1 to {most} bytes, got {declared or 'more'}")
    return content


def _cause(error: BaseException) -> str:
    """Why there is no answer, without the class and number that urllib and sockets write around it."""
    cause = getattr(error, "reason", error)
    if isinstance(cause, IncompleteRead):
        return "the answer was cut off"
    return getattr(cause, "strerror", None) or (one_line_of(cause) if isinstance(cause, BaseException) else str(cause))


def in_one_line(content: bytes) -> str:
    """The message in an answer of a server."""
    text = content.decode("utf-8", "replace")
    try:
        answer = parsed_json(text)
        inner = answer.get("error", answer.get("detail", answer))
        text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except (ValueError, AttributeError):
        pass
    return "".join(sign if sign.isprintable() else "?" for sign in " ".join(text.split()))[:200]
