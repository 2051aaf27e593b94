"""The registration handshake with one socket."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.message import DecodeError

from drastate.drivers import validation
from drastate.drivers._pb import pluginregistration_v1 as pb
from drastate.drivers.channel import Calls, Graveyard, open_channel
from drastate.drivers.folder import Socket
from drastate.drivers.pin import Pin
from drastate.drivers.wire import serialize

if TYPE_CHECKING:
    from pathlib import Path

    from google.protobuf.message import Message

    from drastate.drivers.wire import Api
    from drastate.model import DriverName

#: Longest error text that a plugin is told. Arbitrary; ours are far shorter.
_ERROR_MAX = 1024


class Introduction(NamedTuple):
    """What a plugin says of itself, after all checks."""

    driver: DriverName
    endpoint: str
    api: Api


class Handshake:
    """One attempt: `ask`, then `tell`, then `close`. Another thread may `cancel` it.

    Source:
        k8s.io/kubelet pkg/apis/pluginregistration/v1; kubelet pluginmanager operationexecutor.
    """

    def __init__(self, socket: Socket, timeout_s: float, graveyard: Graveyard) -> None:
        """Connects when the first call is made.

        Args:
            socket: the registration socket; nothing else on its path is connected to.
            timeout_s: for each of the two calls, connecting included.
            graveyard: where the channel ends up.

        Raises:
            OSError: no more files can be opened.
        """
        self._timeout_s = timeout_s
        pin = Pin(socket.path, socket.check_open)
        channel = self._channel = open_channel(pin)
        self._calls = Calls(pin, on_drained=lambda: graveyard.bury(channel, pin))

    def ask(self) -> pb.PluginInfo:
        """Has the plugin introduce itself (GetInfo).

        Raises:
            CallFailedError: no answer.
            RegistrationRefusedError: an answer that is none.
        """
        answer = self._call("GetInfo", pb.InfoRequest())
        try:
            return pb.PluginInfo.FromString(answer)
        except DecodeError:
            reason = "the answer to GetInfo is no PluginInfo message"
            raise validation.RegistrationRefusedError(reason) from None

    def tell(self, refusal: str | None) -> None:
        """Tells the plugin how its registration ended (NotifyRegistrationStatus).

        Args:
            refusal: why it is not registered; None: it is.

        Raises:
            CallFailedError: the plugin did not confirm.
        """
        status = pb.RegistrationStatus(
            plugin_registered=refusal is None, error=(refusal or "")[:_ERROR_MAX]
        )
        self._call("NotifyRegistrationStatus", status)

    def cancel(self) -> None:
        """Ends the call in flight, if any, and lets no other begin."""
        self._calls.cancel()

    def close(self) -> None:
        """Closes the connection; to be called by the thread that made the calls."""
        self._calls.drain()

    def _call(self, method: str, request: Message) -> bytes:
        stub = self._channel.unary_unary(
            f"/pluginregistration.Registration/{method}",
            request_serializer=serialize,
        )
        answer: bytes = self._calls.run(stub, request, self._timeout_s)
        return answer


def check_introduction(info: pb.PluginInfo, *, socket: str, root: Path) -> Introduction:
    """Checks what a plugin says of itself.

    Args:
        info: its answer.
        socket: the registration socket; it is the endpoint too when the plugin names none.
        root: folder that the endpoint must lie in.

    Raises:
        RegistrationRefusedError: the plugin cannot be registered.
    """
    validation.check_type(info.type)
    driver = validation.check_driver_name(info.name)
    try:
        endpoint = validation.check_endpoint(info.endpoint or socket, root)
        api = validation.check_versions(info.supported_versions)
    except validation.RegistrationRefusedError as refused:
        refused.driver = driver
        raise
    return Introduction(driver, endpoint, api)
