"""A driver's answer, checked against the claims that it was asked about. No I/O here.

A driver is foreign code: whatever it answers, every claim asked about gets a result, and a claim
that went well is never lost because another one did not.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from drastate import cdi
from drastate.drivers._pb import dra_v1, dra_v1beta1
from drastate.drivers.validation import quote
from drastate.errors import DriverProtocolError, DriverRefusedError
from drastate.model import CallResult, ClaimRef, ClaimUID, DriverName, Operation, PreparedDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from drastate.drivers.wire import PrepareResponse, UnprepareResponse

#: Longest part of a driver's text that goes into an error, in characters. Arbitrary; a driver may
#: answer megabytes, which would end up in the ledger and in every log. Source: kubelet
#: healthinfo.go cuts messages at the same length.
ERROR_TEXT_MAX = 1024

#: How many foreign claims of an answer are named. Arbitrary; enough to recognise what went wrong.
FOREIGN_MAX = 5

_Device: TypeAlias = dra_v1.Device | dra_v1beta1.Device
_Prepared: TypeAlias = dra_v1.NodePrepareResourceResponse | dra_v1beta1.NodePrepareResourceResponse
_Unprepared: TypeAlias = (
    dra_v1.NodeUnprepareResourceResponse | dra_v1beta1.NodeUnprepareResourceResponse
)


class Answer(NamedTuple):
    """What an answer comes to.

    Attributes:
        results: one for each claim asked about.
        foreign: claim UIDs in the answer that nobody asked about, `FOREIGN_MAX` at most.
    """

    results: dict[ClaimUID, CallResult]
    foreign: tuple[str, ...]


def read_prepare(
    response: PrepareResponse, claims: Sequence[ClaimRef], *, driver: DriverName, endpoint: str
) -> Answer:
    """Reads the answer to NodePrepareResources.

    An entry without devices, or without content at all, is a success with nothing to inject.
    Devices beside an error are ignored.

    Source:
        k8s.io/kubelet pkg/apis/dra/v1, NodePrepareResourcesResponse; that pool and device name are
        there and that CDI device IDs are well formed is checked by us alone: the container runtime
        would fail on it later, and farther from the cause.
    """
    reader = _Reader(driver, endpoint, Operation.PREPARE)

    def read(claim: ClaimRef, entry: _Prepared) -> CallResult:
        if entry.error:
            return reader.refused(claim, entry.error)
        if (fault := _count_fault(entry.devices)) is not None:
            return reader.broken(claim, fault)
        for device in entry.devices:
            if (fault := _find_fault(device)) is not None:
                return reader.broken(claim, fault)
        return CallResult(devices=tuple(_to_model(device) for device in entry.devices))

    return _read(response.claims, claims, read, reader)


def read_unprepare(
    response: UnprepareResponse, claims: Sequence[ClaimRef], *, driver: DriverName, endpoint: str
) -> Answer:
    """Reads the answer to NodeUnprepareResources; an entry without content is a success."""
    reader = _Reader(driver, endpoint, Operation.UNPREPARE)

    def read(claim: ClaimRef, entry: _Unprepared) -> CallResult:
        return reader.refused(claim, entry.error) if entry.error else CallResult()

    return _read(response.claims, claims, read, reader)


def shorten(text: str) -> str:
    """``text``, cut at `ERROR_TEXT_MAX` characters."""
    return text if len(text) <= ERROR_TEXT_MAX else f"{text[: ERROR_TEXT_MAX - 3]}..."


#: Most devices, and most CDI device IDs, of one claim at one driver. Arbitrary, and far above what
#: a node has; each is a row, and other pods' writes wait while they are stored.
DEVICES_MAX = 16_384


class _Reader(NamedTuple):
    """Makes the results of claims that went wrong."""

    driver: DriverName
    endpoint: str
    operation: Operation

    def refused(self, claim: ClaimRef, text: str) -> CallResult:
        verb = "prepare" if self.operation is Operation.PREPARE else "unprepare"
        message = f"driver {self.driver} could not {verb} claim {claim}: {shorten(text)}"
        return CallResult(
            error=DriverRefusedError(
                message,
                driver=self.driver,
                endpoint=self.endpoint,
                claim=str(claim),
                claim_uid=claim.uid,
            )
        )

    def broken(self, claim: ClaimRef, fault: str) -> CallResult:
        message = (
            f"driver {self.driver} answered {self.operation} for claim {claim} against the "
            f"protocol: {fault}. This is a fault of the driver; report it to its author"
        )
        return CallResult(
            error=DriverProtocolError(
                message,
                driver=self.driver,
                endpoint=self.endpoint,
                claim=str(claim),
                claim_uid=claim.uid,
            )
        )


def _read(
    entries: Mapping[str, Any],
    claims: Sequence[ClaimRef],
    read: Callable[[ClaimRef, Any], CallResult],
    reader: _Reader,
) -> Answer:
    results: dict[ClaimUID, CallResult] = {}
    for claim in claims:
        # Asked with "in": indexing a protobuf map makes the entry that was missing.
        if claim.uid in entries:
            results[claim.uid] = read(claim, entries[claim.uid])
        else:
            results[claim.uid] = reader.broken(claim, "it left the claim out")
    # Lazily: an answer has room for hundreds of thousands of them.
    foreign = (uid for uid in entries if uid not in results)
    return Answer(results, tuple(itertools.islice(foreign, FOREIGN_MAX)))


def _count_fault(devices: Sequence[_Device]) -> str | None:
    if len(devices) > DEVICES_MAX:
        return f"{len(devices)} devices for one claim, more than {DEVICES_MAX}"
    ids = sum(len(device.cdi_device_ids) for device in devices)
    if ids > DEVICES_MAX:
        return f"{ids} CDI device IDs for one claim, more than {DEVICES_MAX}"
    return None


def _find_fault(device: _Device) -> str | None:
    if not device.pool_name or not device.device_name:
        return (
            f"a device lacks its pool or device name (pool {quote(device.pool_name)}, device "
            f"{quote(device.device_name)})"
        )
    malformed = (name for name in device.cdi_device_ids if not cdi.is_qualified(name))
    if (name := next(malformed, None)) is not None:
        return f"the CDI device ID {quote(name)} is not of the form vendor/class=name"
    return None


def _to_model(device: _Device) -> PreparedDevice:
    share_id = None
    if isinstance(device, dra_v1.Device) and device.HasField("share_id"):
        share_id = device.share_id
    return PreparedDevice(
        pool=device.pool_name,
        device=device.device_name,
        share_id=share_id,
        request_names=tuple(device.request_names),
        cdi_device_ids=tuple(device.cdi_device_ids),
    )
