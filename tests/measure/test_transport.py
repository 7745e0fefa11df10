"""Requests to servers that are not trusted, each a real one in this process: the key stays, and nothing is unbounded."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

import pytest

from longitude.errors import UsageError
from longitude.measure import transport
from longitude.measure.transport import Refused, Unreachable, address, post

HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
ASKED: list[bytes] = []
"""What servers read, headers and all."""


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that reads one request per connection and then does as it likes."""
    ended, listening = Event(), socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            asked = b""
            while b"\r\n\r\n{" not in asked or not asked.endswith(b"}"):
                asked += connection.recv(2**16)
            ASKED.append(asked)
            answer(connection)

    def accept() -> None:
        with suppress(OSError):
            while not ended.is_set():
                Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        ended.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    ASKED.clear()
    monkeypatch.setattr(transport, "PAUSE", 0.0)
    monkeypatch.setenv(transport.KEY, "secret")


def sends(*parts: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: [connection.sendall(part) for part in parts] and None


def test_the_key_goes_to_the_named_host_alone() -> None:
    """A redirect of any kind is no answer, and the error has the place that it leads to."""
    with server(sends(HEAD, b"\r\n{}")) as other:
        for code in (301, 302, 303, 307, 308):
            ASKED.clear()
            where = f"Location: {other}/v1/completions\r\n\r\n".encode()
            with (
                server(sends(f"HTTP/1.1 {code} Moved\r\n".encode(), where)) as url,
                pytest.raises(Refused, match=other) as told,
            ):
                post(f"{url}/v1/completions", {"a": 1}, timeout=60)
            assert told.value.code == code
            [asked] = ASKED
            assert b"Bearer secret" in asked and url.encode().removeprefix(b"http://") in asked


def dripping(start: bytes) -> Callable[[socket.socket], None]:
    """A start, then a space now and then: no packet is late."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(start)
        while True:
            connection.sendall(b" ")
            Event().wait(0.02)

    return answer


@pytest.mark.parametrize("answer", [dripping(HEAD + b"\r\n"), dripping(HEAD + b"X: "), lambda _: Event().wait(30)])
def test_a_time_is_for_the_whole_answer(answer) -> None:
    """It is asked once, since it would take as long again."""
    with server(answer) as url, pytest.raises(Unreachable, match=r"0\.3 s"):
        post(url, {"a": 1}, timeout=0.3)
    assert len(ASKED) == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (sends(HEAD + b"Content-Length: 9000000\r\n\r\n"), "9000000"),
        (sends(HEAD + b"\r\n", b" " * 2**21), "more"),
        (sends(HEAD + b"\r\n", b"[" * 200_000), "nested"),
        (sends(HEAD + b"\r\n", b"no JSON"), "JSON"),
        (sends(b"HTTP/1.1 400 Bad\r\n\r\n", b"\xff{" + b"[" * 2**20), "400"),
    ],
)
def test_an_answer_that_is_no_answer_is_one_sentence(answer, words: str) -> None:
    with server(answer) as url, pytest.raises(Refused, match=words) as error:
        post(url, {"a": 1}, timeout=60)
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)


def test_a_long_prompt_may_have_a_long_answer() -> None:
    """Echoed log-probabilities are larger than their prompt; the limit follows what was asked."""
    numbers = {"numbers": [0.123456789] * 200_000}
    with server(sends(HEAD + b"\r\n", json.dumps(numbers).encode())) as url:
        assert post(url, {"prompt": [12345] * 20_000}, timeout=60) == numbers
        with pytest.raises(Refused):
            post(url, {"prompt": []}, timeout=60)


def test_why_there_is_no_answer_is_in_words() -> None:
    with server(sends(HEAD + b"Content-Length: 9\r\n\r\n", b"{")) as url, pytest.raises(Unreachable, match="cut off"):
        post(url, {"a": 1}, timeout=60)
    with pytest.raises(Unreachable) as error:
        post(url, {"a": 1}, timeout=60)
    assert not any(sign in str(error.value) for sign in "<>[](){}")


def test_addresses() -> None:
    assert {address(f"http://a:1{end}") for end in ("", "/", "/v1", "/v1/")} == {"http://a:1/v1"}
    for url in ("a:1", "ftp://a/v1", "file:///etc/passwd", "http://", "http://key@a/v1", "https://a:b/v1"):
        with pytest.raises(UsageError):
            address(url)
