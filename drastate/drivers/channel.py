"""gRPC channels to sockets on this node, and calls on them that another thread can cancel."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from drastate.drivers.pin import Pin

_INT32_MAX = 2**31 - 1

#: Largest answer that is taken. It is the kubelet's limit (grpc-go's default, which the kubelet
#: leaves alone), so no driver can count on more; 10 000 CDI device IDs need a quarter of it. More
#: would let one lying driver hold up the others, as no other thread runs while protobuf parses:
#: measured, for the worst 4 MiB it takes 0.1 s, for 16 MiB 1.4 s, for 60 MiB 7 s.
ANSWER_MAX_BYTES = 4 * 1024 * 1024

#: Every option says what breaks without it.
CHANNEL_OPTIONS: tuple[tuple[str, str | int], ...] = (
    # grpcio sends the percent-encoded path as :authority otherwise, and strict servers (tonic, C#)
    # reset every call.
    ("grpc.default_authority", "localhost"),
    # http_proxy and its like would send even unix-socket calls to the proxy.
    ("grpc.enable_http_proxy", 0),
    # Channels to one path share a connection otherwise: a new channel to a replaced socket would
    # inherit the connection, and the backoff, of the old one.
    ("grpc.use_local_subchannel_pool", 1),
    # A restarted driver is back within a second; the default lets a connection sit out up to two
    # minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Despite its name the time that one attempt to connect may take. A driver on a busy node may
    # need seconds to answer; one that hangs must not keep us from its successor for the default of
    # 20.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # After 30 idle minutes the connection would be dropped, and a driver's death not be noticed any
    # more.
    ("grpc.client_idle_timeout_ms", _INT32_MAX),
    ("grpc.max_receive_message_length", ANSWER_MAX_BYTES),
    # Where a driver's error text travels. The default of 8 KiB turns a long text into "resource
    # exhausted"; Go's limit is 16 MiB, so a driver may never have met one. 1 MiB is arbitrary.
    ("grpc.max_metadata_size", 1024 * 1024),
    ("grpc.absolute_max_metadata_size", 1024 * 1024),
    # A Go server closes the connection on pings more often than every 5 minutes, or without a call.
    # 10 keeps well clear of it; a call's own deadline is what ends it, keepalive only clears up
    # behind very long ones.
    ("grpc.keepalive_time_ms", 10 * 60 * 1000),
    ("grpc.keepalive_permit_without_calls", 0),
    # Retries are ours, at one place: the core must not repeat a call behind the count of attempts.
    ("grpc.enable_retries", 0),
)

#: How long a channel rests before it is closed. grpcio polls the state of a subscribed channel in a
#: thread, 0.2 s a round at most, and closing the channel under that thread makes it raise.
_REST_S = 0.5


def open_channel(pin: Pin) -> Any:
    """A channel to the unix socket that ``pin`` holds; connects when first used.

    Args:
        pin: to be closed after the channel (see `Graveyard`).

    Returns:
        A `grpc.Channel`.
    """
    return grpc.insecure_channel(f"unix:{pin.target}", CHANNEL_OPTIONS)


class CallFailedError(Exception):
    """A call that did not end well. Does not leave this room.

    Attributes:
        code: name of the gRPC status code.
        details: its text, for people only.
        sent: False when it is certain that no request left.
        endpoint: where it went.
        error: the `grpc.RpcError`, when there is one.
    """

    def __init__(
        self, code: str, details: str, *, sent: bool, endpoint: str, error: Exception | None = None
    ) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.details = details
        self.sent = sent
        self.endpoint = endpoint
        self.error = error


class Calls:
    """The unary calls in flight on one channel."""

    def __init__(self, pin: Pin, on_drained: Callable[[], None]) -> None:
        """Begins without calls.

        Args:
            pin: where they go; for errors.
            on_drained: called once, when there is no call left after `drain` or `cancel`.
        """
        self._endpoint = pin.path
        self._target = pin.target
        self._on_drained: Callable[[], None] | None = on_drained
        self._lock = threading.Lock()
        self._in_flight: set[Any] = set()
        self._ended = False

    def run(self, method: Any, request: Any, timeout_s: float) -> Any:
        """Makes one call and waits for its answer.

        Args:
            method: a unary multi-callable of the channel.
            request: its message.
            timeout_s: the gRPC deadline.

        Raises:
            CallFailedError: it did not end with status OK, or no more calls are taken.
        """
        with self._lock:
            if self._ended:
                raise CallFailedError(
                    "CANCELLED", "the plugin is gone", sent=False, endpoint=self._endpoint
                )
            call = method.future(request, timeout=timeout_s)
            self._in_flight.add(call)
        try:
            return call.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            raise CallFailedError(
                call.code().name,
                # People know the socket by its path; our number for it would make a new text out
                # of an old failure.
                (call.details() or "").replace(self._target, self._endpoint),
                sent=True,
                endpoint=self._endpoint,
                error=call if isinstance(call, grpc.RpcError) else error,
            ) from error
        finally:
            with self._lock:
                self._in_flight.discard(call)
            self._check_drained()

    def drain(self) -> None:
        """Takes no more calls; those in flight may end."""
        with self._lock:
            self._ended = True
        self._check_drained()

    def cancel(self) -> None:
        """Takes no more calls, and cancels those in flight."""
        with self._lock:
            self._ended = True
            in_flight = tuple(self._in_flight)
        for call in in_flight:
            call.cancel()
        self._check_drained()

    def _check_drained(self) -> None:
        with self._lock:
            if not self._ended or self._in_flight:
                return
            on_drained, self._on_drained = self._on_drained, None
        if on_drained is not None:
            on_drained()


class Graveyard:
    """Channels that nobody uses any more, until they can be closed safely (see `_REST_S`).

    Uses real time whatever the clock: it waits for a thread of grpcio.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resting: list[tuple[float, Callable[[], None]]] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def bury(self, channel: Any, pin: Pin) -> None:
        """Takes a channel whose subscriptions have ended, and its pin; never blocks."""

        def close() -> None:
            channel.close()
            # The library may be about to connect: the pin's number must not be another file's yet.
            self._add(pin.close)

        self._add(close)

    def sweep(self) -> None:
        """Closes what has rested long enough; to be called now and then."""
        now = time.monotonic()
        with self._lock:
            due = [close for at, close in self._resting if at <= now]
            self._resting = [(at, close) for at, close in self._resting if at > now]
        for close in due:
            close()

    def close(self) -> None:
        """From now on closes channels by itself, in a thread that ends with the last one."""
        with self._lock:
            self._closed = True
            self._start_if_closed()

    def _add(self, close: Callable[[], None]) -> None:
        with self._lock:
            self._resting.append((time.monotonic() + _REST_S, close))
            self._start_if_closed()

    def _start_if_closed(self) -> None:
        if self._closed and self._resting and self._thread is None:
            self._thread = threading.Thread(
                target=self._close_all, name="drastate-channels", daemon=True
            )
            self._thread.start()

    def _close_all(self) -> None:
        while True:
            self.sweep()
            with self._lock:
                if not self._resting:
                    self._thread = None
                    return
                pause_s = self._resting[0][0] - time.monotonic()
            time.sleep(max(0.0, pause_s))
