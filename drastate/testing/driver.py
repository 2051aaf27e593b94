"""A DRA driver for tests: real unix sockets, real gRPC, and knobs that can be turned while it runs.

with node_root() as root, FakeDriver(root / "plugins_registry") as driver:
    ...                                      # start what is under test, let it prepare a claim
    assert driver.prepare_calls[uid] == 1
    driver.on_prepare.fail_times = 2         # the next two calls fail
    driver.on_unprepare.hang = True
    driver.die()                             # as SIGKILL does: the socket files stay
    driver.start()                           # the same paths again
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, cast

import grpc
from google.protobuf.message import Message

from drastate.drivers._pb import dra_v1, dra_v1beta1
from drastate.drivers._pb import pluginregistration_v1 as registration
from drastate.model import ClaimRef, ClaimUID, Operation, PreparedDevice
from drastate.testing import cdi_specs
from drastate.testing.behaviour import ALWAYS, Behaviour
from drastate.testing.sockets import SocketServer, node_root

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

__all__ = ["ALWAYS", "Behaviour", "Call", "FakeDriver", "Notification", "node_root"]

#: What a claim gets: by claim UID, or decided for each claim. The text of an exception is what the
#: driver answers as the claim's error.
Devices: TypeAlias = (
    Mapping[str, Sequence[PreparedDevice]] | Callable[[ClaimRef], Sequence[PreparedDevice]]
)

# Spelled out here on purpose: the client's own table of versions must not be what it is tested
# with.
_SERVICES: Mapping[str, tuple[str, ModuleType]] = {
    "v1": ("k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin", dra_v1),
    "v1beta1": ("k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin", dra_v1beta1),
}

#: Calls handled at once. More than any test leaves hanging.
_THREADS = 64

#: How often a call that hangs looks whether it may go on.
_HANG_LOOK_S = 0.01


class Call(NamedTuple):
    """A call that the driver has received.

    Attributes:
        method: "NodePrepareResources" or "NodeUnprepareResources".
        uids: of its claims, in order.
        at: when, on the monotonic clock.
        api: "v1" or "v1beta1".
        claims: the same with namespace and name.
    """

    method: str
    uids: tuple[str, ...]
    at: float
    api: str
    claims: tuple[ClaimRef, ...]


class Notification(NamedTuple):
    """A NotifyRegistrationStatus that the driver has received."""

    registered: bool
    error: str


@dataclass(eq=False)
class FakeDriver:
    """One instance of a driver. As a context manager it starts and stops.

    The driver keeps what it has prepared across `die` and `start`, as one with a checkpoint of its
    own does; clear `prepared` for one that forgets.

    Attributes:
        plugins_registry: folder for its registration socket.
        name: its driver name.
        plugin_dir: folder for its own socket; default ``plugins/<name>`` beside the registry.
        instance: goes into the names of both sockets, for several instances of one driver.
        registration_file: name of the registration socket; default ``<name>-reg.sock``.
        endpoint_file: name of its own socket; default ``dra.sock``.
        versions: what it announces.
        serves: versions of the API that it really serves; read at `start`.
        plugin_type: what it says it is.
        announced_name: what it says its name is; default ``name``.
        announced_endpoint: where it says it can be called; default the real path.
        node_name: pool of its default devices.
        devices: what claims get; default one device "<label>-0" with one CDI device ID.
        cdi_dir: where it writes a CDI spec per claim; None: nowhere. With it the default CDI device
            IDs contain the claim's UID, as specs of two claims must not name the same device.
        on_prepare: how NodePrepareResources is treated.
        on_unprepare: how NodeUnprepareResources is treated.
        info_delay_s: pause before GetInfo is answered.
        notify_fail_times: how many more NotifyRegistrationStatus are answered with an error.
        on_call: called with each call as it arrives, before anything else happens.
        calls: all calls in order of arrival.
        prepare_calls: received NodePrepareResources by claim UID.
        unprepare_calls: received NodeUnprepareResources by claim UID.
        prepared: what is prepared right now, by claim UID.
        notifications: how its registrations ended, in order.
        info_calls: number of GetInfo received.
    """

    plugins_registry: Path
    name: str = "gpu.example.com"
    _: KW_ONLY
    plugin_dir: Path | None = None
    instance: str = ""
    registration_file: str | None = None
    endpoint_file: str | None = None
    versions: Sequence[str] = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
    serves: Collection[str] = ("v1", "v1beta1")
    plugin_type: str = "DRAPlugin"
    announced_name: str | None = None
    announced_endpoint: str | None = None
    node_name: str = "node-a"
    devices: Devices | None = None
    cdi_dir: Path | None = None
    on_prepare: Behaviour = field(default_factory=Behaviour)
    on_unprepare: Behaviour = field(default_factory=Behaviour)
    info_delay_s: float = 0.0
    notify_fail_times: float = 0
    on_call: Callable[[Call], None] | None = None
    calls: list[Call] = field(default_factory=list, init=False)
    prepare_calls: Counter[str] = field(default_factory=Counter, init=False)
    unprepare_calls: Counter[str] = field(default_factory=Counter, init=False)
    prepared: dict[str, tuple[PreparedDevice, ...]] = field(default_factory=dict, init=False)
    notifications: list[Notification] = field(default_factory=list, init=False)
    info_calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._servers: list[SocketServer] = []
        self._ending = threading.Event()
        self._told_at_start = 0

    # --- its life -----------------------------------------------------------------------------

    @property
    def registration_path(self) -> Path:
        """The registration socket."""
        suffix = f"-{self.instance}" if self.instance else ""
        return self.plugins_registry / (self.registration_file or f"{self.name}{suffix}-reg.sock")

    @property
    def endpoint_path(self) -> Path:
        """The socket on which it serves DRAPlugin."""
        folder = self.plugin_dir or self.plugins_registry.parent / "plugins" / self.name
        suffix = f"-{self.instance}" if self.instance else ""
        return folder / (self.endpoint_file or f"dra{suffix}.sock")

    def start(self) -> Self:
        """Makes both sockets, its own one first, and serves. Also after `stop` or `die`."""
        self._ending = threading.Event()
        self.endpoint_path.parent.mkdir(parents=True, exist_ok=True)
        with self._changed:
            self._told_at_start = len(self.notifications)
        handlers = [self._make_service(api) for api in _SERVICES if api in self.serves]
        self._servers = []
        try:
            self._servers.append(SocketServer(self.endpoint_path, handlers, _THREADS))
            self._servers.append(
                SocketServer(self.registration_path, [self._make_registration()], threads=4)
            )
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends in order: the registration socket goes first, then its own; calls are cut off."""
        self._ending.set()
        for server in reversed(self._servers):
            server.stop()
        self._servers = []

    def die(self) -> None:
        """Ends as if killed: both socket files stay, and nobody listens on them."""
        self._ending.set()
        for server in self._servers:
            server.die()
        self._servers = []

    def restart(self) -> None:
        """Dies and starts again on the same paths."""
        self.die()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_registered(self, timeout_s: float = 10.0) -> bool:
        """Waits until it is told that it is registered; whether it was, since it last started."""
        with self._changed:
            return self._changed.wait_for(
                lambda: any(each.registered for each in self.notifications[self._told_at_start :]),
                timeout_s,
            )

    def wait_notified(self, count: int = 1, timeout_s: float = 10.0) -> bool:
        """Waits for the ``count``-th notification, good or bad, since it was made."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.notifications) >= count, timeout_s)

    def wait_calls(self, count: int = 1, timeout_s: float = 10.0) -> bool:
        """Waits until ``count`` calls have arrived since it was made."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.calls) >= count, timeout_s)

    # --- registration -------------------------------------------------------------------------

    def _make_registration(self) -> Any:
        return grpc.method_handlers_generic_handler(
            "pluginregistration.Registration",
            {
                "GetInfo": _unary(self._get_info, registration.InfoRequest),
                "NotifyRegistrationStatus": _unary(self._notify, registration.RegistrationStatus),
            },
        )

    def _get_info(self, _: Message, __: Any) -> Message:
        with self._changed:
            self.info_calls += 1
            self._changed.notify_all()
        self._ending.wait(self.info_delay_s)
        name = self.name if self.announced_name is None else self.announced_name
        endpoint = self.announced_endpoint
        return registration.PluginInfo(
            type=self.plugin_type,
            name=name,
            endpoint=str(self.endpoint_path) if endpoint is None else endpoint,
            supported_versions=self.versions,
        )

    def _notify(self, request: registration.RegistrationStatus, context: Any) -> Message:
        with self._changed:
            self.notifications.append(Notification(request.plugin_registered, request.error))
            fails = self.notify_fail_times > 0
            self.notify_fail_times -= fails
            self._changed.notify_all()
        if fails:
            context.abort(grpc.StatusCode.INTERNAL, "made to fail")
        return registration.RegistrationStatusResponse()

    # --- DRAPlugin ----------------------------------------------------------------------------

    def _make_service(self, api: str) -> Any:
        service, messages = _SERVICES[api]

        def prepare(request: Any, context: Any) -> Message | bytes:
            return self._handle(Operation.PREPARE, api, request, context)

        def unprepare(request: Any, context: Any) -> Message | bytes:
            return self._handle(Operation.UNPREPARE, api, request, context)

        return grpc.method_handlers_generic_handler(
            service,
            {
                "NodePrepareResources": _unary(prepare, messages.NodePrepareResourcesRequest),
                "NodeUnprepareResources": _unary(unprepare, messages.NodeUnprepareResourcesRequest),
            },
        )

    def _handle(
        self, operation: Operation, api: str, request: Any, context: Any
    ) -> Message | bytes:
        claims = tuple(ClaimRef(ClaimUID(c.uid), c.namespace, c.name) for c in request.claims)
        self._note(Call(operation, tuple(c.uid for c in claims), time.monotonic(), api, claims))
        is_prepare = operation is Operation.PREPARE
        behaviour = self.on_prepare if is_prepare else self.on_unprepare
        self._delay(behaviour, context)
        with self._changed:
            fails = behaviour.takes_failure([claim.uid for claim in claims])
        errors: dict[str, str] = {}
        for claim in claims:
            spoilt = fails and (behaviour.code is not None or behaviour.does_fail(claim.uid))
            if spoilt:
                errors[claim.uid] = behaviour.error
            if spoilt and not behaviour.late and not behaviour.devices_too:
                continue
            error = self._prepare(claim) if is_prepare else self._unprepare(claim)
            if error is not None:
                errors[claim.uid] = error
        if fails and behaviour.code is not None:
            context.abort(behaviour.code, behaviour.error)
        if behaviour.garbage is not None:
            return behaviour.garbage
        return self._answer(operation, api, claims, errors)

    def _note(self, call: Call) -> None:
        counter = self.prepare_calls if call.method == Operation.PREPARE else self.unprepare_calls
        with self._changed:
            if self.on_call is not None:
                self.on_call(call)
            counter.update(call.uids)
            self.calls.append(call)
            self._changed.notify_all()

    def _delay(self, behaviour: Behaviour, context: Any) -> None:
        self._ending.wait(behaviour.delay_s)
        while behaviour.hang and not self._ending.is_set():
            time.sleep(_HANG_LOOK_S)
        if self._ending.is_set():
            # The process is dead: what had not happened by now never happens.
            context.abort(grpc.StatusCode.UNAVAILABLE, "the fake driver is gone")

    def _prepare(self, claim: ClaimRef) -> str | None:
        try:
            devices = tuple(self._choose_devices(claim))
        except Exception as error:  # noqa: BLE001 (whatever a test's function raises)
            return str(error)
        if self.cdi_dir is not None:
            kind = cdi_specs.default_kind(self.name)
            cdi_specs.write_spec(self.cdi_dir, kind, claim.uid, devices)
        with self._changed:
            self.prepared[claim.uid] = devices
        return None

    def _unprepare(self, claim: ClaimRef) -> str | None:
        if self.cdi_dir is not None:
            cdi_specs.remove_spec(self.cdi_dir, cdi_specs.default_kind(self.name), claim.uid)
        with self._changed:
            self.prepared.pop(claim.uid, None)
        return None

    def _choose_devices(self, claim: ClaimRef) -> Sequence[PreparedDevice]:
        if callable(self.devices):
            return self.devices(claim)
        if self.devices is not None and claim.uid in self.devices:
            return self.devices[claim.uid]
        kind = cdi_specs.default_kind(self.name)
        return [self.make_device(claim, f"{kind.partition('/')[2]}-0")]

    def make_device(self, claim: ClaimRef, device: str, **fields: Any) -> PreparedDevice:
        """A device with the CDI device ID that this driver would give it.

        Args:
            claim: that gets it.
            device: its name.
            fields: of `PreparedDevice`; ``pool`` defaults to the node's name.
        """
        kind = cdi_specs.default_kind(self.name)
        cdi_name = device if self.cdi_dir is None else f"{claim.uid}-{device}"
        defaults = {"pool": self.node_name, "cdi_device_ids": (f"{kind}={cdi_name}",)}
        return PreparedDevice(device=device, **{**defaults, **fields})

    def _answer(
        self,
        operation: Operation,
        api: str,
        claims: Sequence[ClaimRef],
        errors: Mapping[str, str],
    ) -> Message:
        messages = _SERVICES[api][1]
        is_prepare = operation is Operation.PREPARE
        behaviour = self.on_prepare if is_prepare else self.on_unprepare
        response: Any = getattr(messages, f"{operation}Response")()
        for uid in behaviour.foreign:
            response.claims[uid].error = ""
        for claim in claims:
            if behaviour.does_omit(claim.uid):
                continue
            entry = response.claims[claim.uid]
            if claim.uid in behaviour.empty:
                continue
            entry.error = errors.get(claim.uid, "")
            if is_prepare and (not entry.error or behaviour.devices_too):
                with self._changed:
                    devices = self.prepared.get(claim.uid, ())
                entry.devices.extend(_to_wire(messages, device) for device in devices)
        return cast("Message", response)


def _unary(handler: Callable[[Any, Any], Message | bytes], request: type[Message]) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        handler,
        request_deserializer=request.FromString,
        response_serializer=_serialize,
    )


def _serialize(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def _to_wire(messages: ModuleType, device: PreparedDevice) -> Message:
    message = messages.Device(
        pool_name=device.pool,
        device_name=device.device,
        request_names=device.request_names,
        cdi_device_ids=device.cdi_device_ids,
    )
    if device.share_id is not None and messages is dra_v1:
        message.share_id = device.share_id
    return cast("Message", message)
