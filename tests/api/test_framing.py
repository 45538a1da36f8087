"""HTTP/1.1 framing over a raw socket: each answer belongs to its request, whatever went wrong before (RFC 9112)."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from pagedserve.api import body as body_module
from pagedserve.api import http_protocol
from tests.api.conftest import Front, FrontFactory
from tests.helpers.streams import check_error_body

GOOD = json.dumps({"prompt": "say good"}).encode()


class Connection:
    """One TCP connection that speaks bytes."""

    def __init__(self, front: Front):
        url = httpx.URL(front.base_url)
        self._socket = socket.create_connection((url.host, url.port), timeout=60)
        self._file = self._socket.makefile("rb")

    def send(self, *lines: str, body: bytes = b"") -> None:
        self._socket.sendall("\r\n".join([*lines, "Host: x", "", ""]).encode("latin-1") + body)

    def post(self, body: bytes, *headers: str) -> None:
        self.send(
            "POST /v1/completions HTTP/1.1",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *headers,
            body=body,
        )

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer; status 0 at the end of the connection."""
        status_line = self._file.readline().decode()
        if not status_line:
            return 0, {}, b""
        headers = {}
        while line := self._file.readline().strip().decode("latin-1"):
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        status = int(status_line.split()[1])
        if status == 100:
            return status, headers, b""
        if headers.get("transfer-encoding") != "chunked":
            return status, headers, self._file.read(int(headers.get("content-length", 0)))
        body = b""
        while size := int(self._file.readline(), 16):
            body += self._file.read(size)
            assert self._file.read(2) == b"\r\n"
        assert self._file.readline() == b"\r\n"
        return status, headers, body

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@pytest.fixture
def connection(front: Front) -> Iterator[Connection]:
    with contextlib.closing(Connection(front)) as connection:
        yield connection


def check_good(connection: Connection) -> None:
    connection.post(GOOD)
    status, _, body = connection.answer()
    assert status == 200
    assert json.loads(body)["choices"][0]["text"] == "good"


@pytest.mark.parametrize("bad", [b"x" * 200_000, b'{"prompt": "a", "n": 0}' + b" " * 200_000, b"{"])
def test_a_bad_request_does_not_spoil_the_next(connection: Connection, bad: bytes) -> None:  # C104
    for _ in range(3):
        connection.post(bad)
        status, _, body = connection.answer()
        assert status == 400
        check_error_body(body)
        check_good(connection)


def test_a_refused_body_that_was_not_read_does_not_either(make_front: FrontFactory) -> None:  # C104
    front = make_front(api_key=("k",), max_body_size="100KiB")
    with contextlib.closing(Connection(front)) as connection:
        for _ in range(2):
            connection.post(b"x" * 200_000)
            assert connection.answer()[0] == 401
            connection.post(b"x" * 200_000, "Authorization: Bearer k")
            assert connection.answer()[0] == 413
            connection.post(GOOD, "Authorization: Bearer k ")
            assert connection.answer()[0] == 200
            connection.post(GOOD, "Authorization: Bearer ")
            assert connection.answer()[0] == 401


def test_unknown_paths_with_a_body(connection: Connection) -> None:
    connection.send("POST /nothing HTTP/1.1", "Content-Length: 100000", body=b"x" * 100_000)
    assert connection.answer()[0] == 404
    check_good(connection)


def test_expect_100_continue(connection: Connection) -> None:
    connection.send(
        "POST /v1/completions HTTP/1.1",
        "Content-Type: application/json",
        f"Content-Length: {len(GOOD)}",
        "Expect: 100-continue",
    )
    assert connection.answer()[0] == 100
    connection._socket.sendall(GOOD)
    assert connection.answer()[0] == 200
    check_good(connection)


def test_chunked_request_body(connection: Connection) -> None:
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (GOOD[:5], GOOD[5:]))
    connection.send(
        "POST /v1/completions HTTP/1.1",
        "Content-Type: application/json",
        "Transfer-Encoding: chunked",
        body=pieces + b"0\r\n\r\n",
    )
    assert connection.answer()[0] == 200
    check_good(connection)


def test_an_offer_of_h2c_is_not_taken(connection: Connection) -> None:  # C104
    connection.post(GOOD, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    status, _, body = connection.answer()
    assert status == 200
    assert json.loads(body)["choices"][0]["text"] == "good"


def test_offers_to_upgrade_split_anywhere(front: Front) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    raw = f"{head}Content-Type: application/json\r\nContent-Length: {len(GOOD)}\r\n\r\n".encode() + GOOD
    for cut in (10, 60, len(raw) - len(GOOD), len(raw) - 3):
        with contextlib.closing(Connection(front)) as connection:
            connection._socket.sendall(raw[:cut])
            time.sleep(0.02)
            connection._socket.sendall(raw[cut:])
            assert connection.answer()[0] == 200
            check_good(connection)


def test_an_offer_of_a_websocket_is_not_taken_either(connection: Connection) -> None:
    connection.send("GET /health HTTP/1.1", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    assert connection.answer()[0] == 200
    check_good(connection)


def test_pipelined_requests_are_answered_in_order(connection: Connection) -> None:  # C104
    connection.send("GET /version HTTP/1.1")
    connection.send("GET /v1/models HTTP/1.1")
    connection.post(GOOD)
    assert b"version" in connection.answer()[2]
    assert b'"list"' in connection.answer()[2]
    assert b"good" in connection.answer()[2]


def test_http_1_0(front: Front) -> None:  # C104
    with contextlib.closing(Connection(front)) as connection:
        connection.send("GET /health HTTP/1.0")
        assert connection.answer()[0] == 200
        assert connection.answer()[0] == 0


def test_two_streams_on_one_connection(connection: Connection) -> None:
    body = json.dumps({"prompt": "say twice", "stream": True}).encode()
    for _ in range(2):
        connection.post(body)
        status, headers, raw = connection.answer()
        assert status == 200
        assert headers["content-type"].startswith("text/event-stream")
        assert raw.endswith(b"data: [DONE]\n\n")
    check_good(connection)


def test_after_an_error_event_the_connection_goes_on(connection: Connection) -> None:
    connection.post(json.dumps({"prompt": "fail EngineStepError 2", "stream": True}).encode())
    status, _, raw = connection.answer()
    assert status == 200
    assert raw.endswith(b"data: [DONE]\n\n")
    check_good(connection)


def test_what_is_no_http_is_answered_in_our_shape(front: Front) -> None:
    for raw in (b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET /\x00 HTTP/1.1\r\n\r\n"):
        with contextlib.closing(Connection(front)) as connection:
            connection._socket.sendall(raw)
            status, headers, body = connection.answer()
            assert (status, headers["content-type"], headers["connection"]) == (400, "application/json", "close")
            check_error_body(body)
            assert connection.answer()[0] == 0


def test_a_head_without_end_is_refused(front: Front) -> None:
    with contextlib.closing(Connection(front)) as connection:
        connection._socket.sendall(b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 20_000)
        status, _, body = connection.answer()
        assert status == 431
        check_error_body(body)
    with contextlib.closing(Connection(front)) as connection:
        connection.send("GET /health HTTP/1.1", *[f"x-{i}: {'y' * 100}" for i in range(100)])
        assert connection.answer()[0] == 200


def test_a_head_that_does_not_come_is_a_408(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    with contextlib.closing(Connection(front)) as connection:
        connection._socket.sendall(b"GET /health HTTP/1.1\r\n")
        status, _, body = connection.answer()
        assert status == 408
        check_error_body(body)
    with contextlib.closing(Connection(front)) as connection:
        assert connection.answer()[0] == 0  # who says nothing is told nothing
    # Each head has its own time: together these take longer than one may.
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 1.0)
    with contextlib.closing(Connection(front)) as connection:
        for _ in range(3):
            check_good(connection)
            connection._socket.sendall(b"GET /hea")
            time.sleep(0.4)
            connection._socket.sendall(b"lth HTTP/1.1\r\n\r\n")
            assert connection.answer()[0] == 200


def test_drops_of_a_body_are_a_408(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "PART_SECONDS", 0.3)
    with contextlib.closing(Connection(front)) as connection:
        connection.send("POST /v1/completions HTTP/1.1", "Content-Type: application/json", "Content-Length: 100000")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(40):
                connection._socket.sendall(b" ")
                time.sleep(0.02)
        assert connection.answer()[0] == 408


def test_a_large_body_does_not_hold_up_others(front: Front) -> None:
    # A million small objects, which take seconds to read: meanwhile others are served many times.
    body = b'{"prompt": "a", "tools": [' + b'{"a":1},' * 1_000_000 + b"{}]}"
    answered = threading.Event()

    def ask() -> None:
        response = httpx.post(
            f"{front.base_url}/v1/completions", content=body, headers={"Content-Type": "application/json"}, timeout=60
        )
        assert response.status_code == 400
        answered.set()

    asking = threading.Thread(target=ask)
    asking.start()
    num_served = 0
    while not answered.is_set() and num_served < 10_000:
        assert front.client.get("/health").status_code == 200
        num_served += 1
    asking.join()
    assert num_served > 5
