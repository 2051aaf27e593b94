"""Sockets that speak anything but gRPC, or gRPC up to a point; each connection in a thread."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
SETTINGS_ACK = b"\0\0\0\x04\x01\0\0\0\0"


def goaway(error: int, debug: bytes = b"") -> bytes:
    """A GOAWAY frame."""
    payload = struct.pack(">II", 0, error) + debug
    return struct.pack(">I", len(payload))[1:] + b"\x07\0\0\0\0\0" + payload


def headers(stream: int, block: bytes) -> bytes:
    """A HEADERS frame that ends the headers."""
    return struct.pack(">I", len(block))[1:] + b"\x01\x04" + struct.pack(">I", stream) + block


def silent(connection: socket.socket) -> None:
    """Reads and never says a word."""
    while connection.recv(65536):
        pass


def closes_at_once(connection: socket.socket) -> None:
    """Says nothing and hangs up."""


def speaks_http1(connection: socket.socket) -> None:
    """Answers like a web server of old."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    silent(connection)


def sends_garbage(connection: socket.socket) -> None:
    """Sends noise without end."""
    while True:
        connection.sendall(os.urandom(4096))


def settings_then_silence(connection: socket.socket) -> None:
    """Is an HTTP/2 server as far as a client can tell, and answers nothing."""
    connection.sendall(SETTINGS + SETTINGS_ACK)
    silent(connection)


def goaway_storm(connection: socket.socket) -> None:
    """Takes every connection and sends it away."""
    connection.sendall(SETTINGS + SETTINGS_ACK + goaway(0))


def too_many_pings(connection: socket.socket) -> None:
    """Complains like a Go server of keepalive, with the first call."""
    connection.sendall(SETTINGS + SETTINGS_ACK)
    connection.recv(65536)
    time.sleep(0.05)
    connection.sendall(goaway(0xB, b"too_many_pings"))


def slow_loris(connection: socket.socket) -> None:
    """Answers a byte now and then."""
    connection.sendall(SETTINGS + SETTINGS_ACK)
    # ":status: 200", then a content type that goes on for an hour.
    answer = headers(1, b"\x88\x5f\x10application/grpc" + b"\x00\x01x\x7f" + b"y" * 100)
    for byte in answer:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)
    silent(connection)


def resets_streams(connection: socket.socket) -> None:
    """Cancels whatever is asked for, as some servers do at the deadline (RST_STREAM, CANCEL)."""
    connection.sendall(SETTINGS + SETTINGS_ACK)
    heard = b""
    while data := connection.recv(65536):
        heard += data
        if b"Resources" in heard:
            streams = frames_of(heard.removeprefix(PREFACE))
            for stream in {number for kind, number, _ in streams if kind == 1}:
                connection.sendall(b"\0\0\x04\x03\0" + struct.pack(">II", stream, 8))
            heard = b""


def frames_of(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(type, stream, payload) of each whole frame."""
    while len(data) >= 9:
        size = int.from_bytes(data[:3], "big")
        if len(data) < 9 + size:
            return
        yield data[3], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]
        data = data[9 + size :]


class Rogue:
    """A listener on ``path`` that treats each connection as ``serve`` says; a context manager."""

    def __init__(self, path: Path, serve: Callable[[socket.socket], None]) -> None:
        self.path = path
        self.accepted = 0
        self._serve = serve
        self._connections: list[socket.socket] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(128)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            self._connections.append(connection)
            threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self._serve(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
