"""One registered endpoint of a driver: its connection, and the calls on it."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.protobuf.message import DecodeError

from drastate.drivers.channel import Calls, Graveyard, open_channel
from drastate.drivers.pin import Pin
from drastate.drivers.validation import check_open_endpoint
from drastate.drivers.wire import serialize
from drastate.model import ClaimRef, DriverName, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime
    from pathlib import Path

    from drastate.clock import Clock
    from drastate.drivers.notices import Notices
    from drastate.drivers.wire import Api, PrepareResponse, UnprepareResponse

_log = logging.getLogger(__name__)

#: Least pause between two requests for a connection. Without it a server that accepts connections
#: and ends them would keep us busy with nothing else. Arbitrary; a driver that restarts has run for
#: longer.
_REST_S = 0.5


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A registered plugin, as others see it.

    Attributes:
        driver: name of its driver.
        endpoint: the socket that is called.
        registration_socket: the socket it registered with.
        api: the version that is called, such as "v1.DRAPlugin".
        connected: the connection to the endpoint is up.
        registered_at: when it registered.
        since: when it became connected or disconnected.
        problem: why what lies at the endpoint now must not be connected to; mostly None.
    """

    driver: DriverName
    endpoint: str
    registration_socket: str
    api: str
    connected: bool
    registered_at: datetime
    since: datetime
    problem: str | None = None


class UnreadableAnswerError(Exception):
    """An answer came that is not the message it should be. Does not leave this room.

    Attributes:
        endpoint: where it came from.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.endpoint = endpoint


class Plugin:
    """A connection that is opened at once and kept up for as long as the plugin is registered.

    A socket file says nothing about the process behind it, so whether a plugin can be used is told
    by the connection alone.

    Source:
        kubelet pkg/kubelet/cm/dra/plugin, dra_plugin_manager.go (since 1.34).
    """

    def __init__(
        self,
        driver: DriverName,
        endpoint: str,
        api: Api,
        *,
        root: Path,
        registration_socket: str,
        order: int,
        clock: Clock,
        graveyard: Graveyard,
        notices: Notices,
    ) -> None:
        """Makes no connection yet.

        Args:
            driver: its name, checked.
            endpoint: path of its socket, checked.
            api: the version to call.
            root: folder that the endpoint must lie in, at each connect.
            registration_socket: path of the socket it registered with.
            order: the plugin of a driver with the highest one is preferred.
            clock: for the time stamps.
            graveyard: where the channel ends up.
            notices: for the log.

        Raises:
            OSError: no more files can be opened.
        """
        self.driver = driver
        self.endpoint = endpoint
        self.api = api
        self.registration_socket = registration_socket
        self.order = order
        self._clock = clock
        self._graveyard = graveyard
        self._notices = notices
        self._registered_at = self._since = clock.now()
        self._lock = threading.Lock()
        self._on_connected: Callable[[Plugin], None] = _ignore
        self._connected = False
        self._retired = False
        self._asked_at = 0.0
        self._pin = Pin(endpoint, lambda fd: check_open_endpoint(fd, endpoint, root))
        self._channel: Any = open_channel(self._pin)
        self._calls = Calls(self._pin, on_drained=self._bury)
        self._methods = {operation: self._make_method(operation) for operation in Operation}

    @property
    def connected(self) -> bool:
        """Whether the connection to the endpoint is up."""
        return self._connected

    @property
    def retired(self) -> bool:
        """Whether it has been given up."""
        return self._retired

    @property
    def info(self) -> PluginInfo:
        """What others may know of it."""
        with self._lock:
            return PluginInfo(
                driver=self.driver,
                endpoint=self.endpoint,
                registration_socket=self.registration_socket,
                api=self.api.version,
                connected=self._connected,
                registered_at=self._registered_at,
                since=self._since,
                problem=self._pin.problem,
            )

    def connect(self, on_connected: Callable[[Plugin], None]) -> None:
        """Starts connecting and keeps the connection up.

        Args:
            on_connected: called in a thread of grpcio whenever the connection comes up; must not
                block.
        """
        with self._lock:
            self._on_connected = on_connected
            self._asked_at = self._clock.monotonic()
            self._subscribe(self._follow)

    def refresh(self) -> None:
        """Lets the next attempt to connect find the socket that lies at the endpoint now.

        To be called now and then: that a driver has made a new one is no event, and a connection
        that is lost as soon as it is made is none either. Does nothing while the connection is up.
        """
        if not self._connected:
            self._pin.refresh()
            self._ask_for_connection()

    def prepare(self, claims: Sequence[ClaimRef], timeout_s: float) -> PrepareResponse:
        """Makes one NodePrepareResources call, without any retry.

        Raises:
            CallFailedError: it did not end with status OK.
            UnreadableAnswerError: it did, but with bytes that are no answer.
        """
        return cast("PrepareResponse", self._call(Operation.PREPARE, claims, timeout_s))

    def unprepare(self, claims: Sequence[ClaimRef], timeout_s: float) -> UnprepareResponse:
        """Makes one NodeUnprepareResources call, without any retry.

        Raises:
            CallFailedError: it did not end with status OK.
            UnreadableAnswerError: it did, but with bytes that are no answer.
        """
        return cast("UnprepareResponse", self._call(Operation.UNPREPARE, claims, timeout_s))

    def retire(self, *, cancel: bool = False) -> None:
        """Gives the connection up; does not block.

        Args:
            cancel: also cancel the calls in flight. Otherwise the connection lasts until they have
                ended: a driver that takes its registration back while it shuts down may still
                answer them.
        """
        with self._lock:
            self._retired = True
            self._connected = False
            self._channel.unsubscribe(self._follow)
        if cancel:
            self._calls.cancel()
        else:
            self._calls.drain()

    def _call(self, operation: Operation, claims: Sequence[ClaimRef], timeout_s: float) -> Any:
        started = self._clock.monotonic()
        request = self.api.request(operation, claims)
        try:
            answer = self._calls.run(self._methods[operation], request, timeout_s)
            return self.api.response_class(operation).FromString(answer)
        except DecodeError as error:
            raise UnreadableAnswerError(self.endpoint) from error
        finally:
            facts = {
                "driver": self.driver,
                "endpoint": self.endpoint,
                "duration_s": self._clock.monotonic() - started,
            }
            _log.debug("a driver call has ended", extra=facts)

    def _make_method(self, operation: Operation) -> Any:
        # Answers arrive as bytes: for grpcio an answer that cannot be read is one that never came.
        return self._channel.unary_unary(self.api.path(operation), request_serializer=serialize)

    def _follow(self, state: grpc.ChannelConnectivity) -> None:
        connected = state is grpc.ChannelConnectivity.READY
        if not connected:
            self._pin.refresh()
        with self._lock:
            if self._retired:
                return
            changed = connected is not self._connected
            self._connected = connected
            if changed:
                self._since = self._clock.now()
        if changed:
            facts = {"driver": self.driver, "endpoint": self.endpoint}
            what = "connected" if connected else "disconnected"
            self._notices.log(_log, logging.INFO, what, about=self.driver, extra=facts)
        if changed and connected:
            self._on_connected(self)
        if state is grpc.ChannelConnectivity.IDLE:
            self._ask_for_connection()

    def _subscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        # Under the lock: a subscription after `retire` would outlive the channel.
        if not self._retired:
            self._channel.subscribe(callback, try_to_connect=True)

    def _ask_for_connection(self) -> None:
        # A lost connection rests until somebody calls; to know when the driver is back, it must be
        # asked for.
        with self._lock:
            now = self._clock.monotonic()
            if now - self._asked_at < _REST_S:
                return
            self._asked_at = now
            self._subscribe(_ignore)
            self._channel.unsubscribe(_ignore)

    def _bury(self) -> None:
        self._graveyard.bury(self._channel, self._pin)


def _ignore(_: object) -> None:
    """Hears and does nothing."""
