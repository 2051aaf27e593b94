"""Frozen values that travel between the rooms. No I/O here, and no clock.

The words are the field's: a *claim* is a ResourceClaim object; a *pod claim* is an entry of
``spec.resourceClaims`` and names a claim; a *driver* is a name; a *plugin* is one registered
endpoint of it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import NewType

ClaimUID = NewType("ClaimUID", str)
PodUID = NewType("PodUID", str)
DriverName = NewType("DriverName", str)

_NO_ANNOTATIONS: Mapping[str, str] = MappingProxyType({})


class Operation(enum.StrEnum):
    """The two calls of the DRAPlugin service, by the names that skipNodeOperations uses too."""

    PREPARE = "NodePrepareResources"
    UNPREPARE = "NodeUnprepareResources"


# --- pods, as far as DRA reads them ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PodClaim:
    """One entry of ``spec.resourceClaims``, with its claim's name resolved.

    Attributes:
        name: the entry's own name, which containers refer to.
        claim_name: name of the ResourceClaim in the pod's namespace. None: the status says that
            this entry needs no claim (a null resourceClaimName), so there is nothing to do for it.
        from_template: made from a ResourceClaimTemplate, so the pod (or its PodGroup) must own the
            claim.
        unresolved: why ``claim_name`` could not be resolved; None when it could.
    """

    name: str
    claim_name: str | None
    from_template: bool = False
    unresolved: str | None = None


@dataclass(frozen=True, slots=True)
class RequestRef:
    """What a container asks of a pod claim: one request of it, or ("") the whole claim."""

    pod_claim: str
    request: str = ""


@dataclass(frozen=True, slots=True)
class Container:
    """A container's references to claims.

    Attributes:
        name: unique among all containers of the pod, init and ephemeral ones included.
        requests: its ``resources.claims`` in order.
        extended: names of requests of the pod's extended-resource claim that back this container's
            extended resources, from ``status.extendedResourceClaimStatus.requestMappings``.
    """

    name: str
    requests: tuple[RequestRef, ...] = ()
    extended: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pod:
    """What the manager needs to know of a pod.

    Attributes:
        uid: metadata.uid.
        namespace: metadata.namespace.
        name: metadata.name.
        claims: the pod's claims in spec order.
        containers: init, regular and ephemeral containers, in this order.
        extended_claim: name of the claim the scheduler made for extended resources (KEP 5004), or
            None.
        pod_group: ``spec.schedulingGroup.podGroupName``, or None.
    """

    uid: PodUID
    namespace: str
    name: str
    claims: tuple[PodClaim, ...] = ()
    containers: tuple[Container, ...] = ()
    extended_claim: str | None = None
    pod_group: str | None = None

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


# --- ResourceClaims -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Owner:
    """The controller owner reference of a claim."""

    api_version: str
    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Consumer:
    """One entry of ``status.reservedFor``."""

    api_group: str
    resource: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class AllocatedDevice:
    """One entry of ``status.allocation.devices.results``.

    Attributes:
        driver: DRA driver name.
        pool: pool name.
        device: device name.
        request: "request", or "request/subrequest" when a prioritized list was allocated (KEP
            4816).
        share_id: for a device that several claims share (KEP 5075), else None.
        admin_access: KEP 5018.
        skip: node operations this result needs no call for (KEP 5945); "*" is stored as both.
    """

    driver: DriverName
    pool: str
    device: str
    request: str = ""
    share_id: str | None = None
    admin_access: bool = False
    skip: frozenset[Operation] = frozenset()


@dataclass(frozen=True, slots=True)
class ClaimRef:
    """Names one claim: what a driver is told about it."""

    uid: ClaimUID
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Claim:
    """A ResourceClaim object as far as a node needs it.

    Attributes:
        ref: UID, namespace, name.
        owner: its controller, None when it has none.
        reserved_for: who may use it.
        allocation: None while it is not allocated; an allocation without devices is an empty tuple.
    """

    ref: ClaimRef
    owner: Owner | None = None
    reserved_for: tuple[Consumer, ...] = ()
    allocation: tuple[AllocatedDevice, ...] | None = None


# --- what drivers answer --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """One device of a driver's answer to NodePrepareResources.

    Attributes:
        pool: pool name.
        device: device name.
        share_id: DRAPlugin v1 only.
        request_names: requests of the claim that the device belongs to; empty: all of them.
        cdi_device_ids: fully qualified CDI device names, in the driver's order.
    """

    pool: str
    device: str
    share_id: str | None = None
    request_names: tuple[str, ...] = ()
    cdi_device_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallResult:
    """How one driver call ended for one claim.

    Attributes:
        error: None on success.
        devices: on success of a prepare, the driver's complete answer (it replaces any answer
            before).
        called: False only when it is certain that no request left this process.
        answered: False when a request left and no answer to it came back, so that it may still
            take effect, even if a repeated one was answered since.
    """

    error: Exception | None = None
    devices: tuple[PreparedDevice, ...] = ()
    called: bool = True
    answered: bool = True


@dataclass(frozen=True, slots=True)
class ContainerInfo:
    """What the container runtime needs for one container.

    Attributes:
        cdi_devices: fully qualified CDI device names without duplicates, for CRI
            ``ContainerConfig.CDIDevices``.
        annotations: the same devices as CDI annotations, key ``cdi.k8s.io/<driver>_<claim UID>``,
            value the comma-joined names (what kubelets up to 1.30 passed). Drivers whose name is
            too long for a key are missing here; `cdi_devices` always has everything.
    """

    cdi_devices: tuple[str, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=lambda: _NO_ANNOTATIONS)


# --- claims as the ledger knows them --------------------------------------------------------------


class ClaimState(enum.StrEnum):
    """The life of a (claim, driver) and, derived from its drivers, of a claim."""

    PREPARING = "PREPARING"
    PREPARED = "PREPARED"
    UNPREPARING = "UNPREPARING"
    UNPREPARED = "UNPREPARED"


@dataclass(frozen=True, slots=True)
class PodReference:
    """A pod that a claim is held for.

    Attributes:
        uid: the pod's UID.
        namespace: for people.
        name: for people.
        releasing: the pod asked to let go, and the claim's drivers have not all confirmed yet.
    """

    uid: PodUID
    namespace: str
    name: str
    releasing: bool = False

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class DriverRecord:
    """What the ledger knows of one (claim, driver).

    Attributes:
        state: where it is in its life.
        since: when it entered that state.
        called: a NodePrepareResources may have left the process since the last confirmed unprepare,
            so an unprepare is owed.
        unanswered: one of those calls got no answer (deadline, lost connection, our own death) not
            long ago: it may still land, even after an unprepare.
        attempts: calls of the operation that the state names, in a row without success; 0 after a
            success.
        failing_since: first failure of that row.
        last_error: text of the last failure, bounded.
        devices: the driver's last complete answer.
        boot_id: the boot in which it was prepared; None: unknown, to be treated as another boot.
        skip: operations the allocation says need no call, as of the time it was prepared.
        confirmed_at: when the driver first confirmed an unprepare that has to be confirmed again,
            because a call that got no answer may still take effect.
        allocated: what the claim's allocation gave it at this driver when it was last prepared.
    """

    state: ClaimState
    since: datetime
    called: bool = False
    unanswered: bool = False
    attempts: int = 0
    failing_since: datetime | None = None
    last_error: str | None = None
    devices: tuple[PreparedDevice, ...] = ()
    boot_id: str | None = None
    skip: frozenset[Operation] = frozenset()
    confirmed_at: datetime | None = None
    allocated: tuple[AllocatedDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """What the ledger knows of one claim. Never changed in place: a commit replaces it."""

    ref: ClaimRef
    created_at: datetime
    drivers: Mapping[DriverName, DriverRecord]
    pods: Mapping[PodUID, PodReference]

    @property
    def active_pods(self) -> tuple[PodReference, ...]:
        """The pods that hold the claim and have not asked to let go."""
        return tuple(pod for pod in self.pods.values() if not pod.releasing)

    @property
    def status(self) -> ClaimState:
        """The claim's own state, derived from its drivers and its pods (see `derive_status`)."""
        return derive_status(
            (driver.state for driver in self.drivers.values()), held=bool(self.pods)
        )

    @property
    def is_settled(self) -> bool:
        """Nothing is held and nothing is owed: the record is history."""
        return not self.pods and self.status is ClaimState.UNPREPARED


def derive_status(states: Iterable[ClaimState], *, held: bool) -> ClaimState:
    """The state of a claim whose drivers are in ``states``.

    The least finished driver decides: one that is still unpreparing makes the claim UNPREPARING,
    one that is not prepared yet makes it PREPARING. A claim without drivers is PREPARED while a pod
    holds it (kubelet: an allocation without devices is tracked and ends up prepared, with no call).
    """
    present = set(states)
    if not present:
        return ClaimState.PREPARED if held else ClaimState.UNPREPARED
    if present == {ClaimState.UNPREPARED}:
        return ClaimState.UNPREPARED
    if ClaimState.UNPREPARING in present or not held:
        return ClaimState.UNPREPARING
    if present == {ClaimState.PREPARED}:
        return ClaimState.PREPARED
    return ClaimState.PREPARING


# --- live pods ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PodSnapshot:
    """The pods that are live on the node, as their source knows them.

    Attributes:
        uids: UIDs of all live pods.
        complete: the source vouches that no live pod is missing. Only a complete snapshot can ever
            show that a pod is gone; after a failed, truncated or undecodable listing it must be
            False.
    """

    uids: Collection[PodUID]
    complete: bool


# --- history --------------------------------------------------------------------------------------


class EventKind(enum.StrEnum):
    """What an entry of the ledger's history can say."""

    OPENED = "opened"
    CLOSED = "closed"
    REFUSED = "refused"
    PREPARE_STARTED = "prepare_started"
    PREPARED = "prepared"
    PREPARE_FAILED = "prepare_failed"
    POD_ADDED = "pod_added"
    POD_RELEASED = "pod_released"
    UNPREPARE_STARTED = "unprepare_started"
    UNPREPARED = "unprepared"
    UNPREPARE_FAILED = "unprepare_failed"
    UNPREPARE_TO_CONFIRM = "unprepare_to_confirm"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the ledger's history.

    Attributes:
        kind: what happened.
        at: when.
        claim: the claim it happened to, None when it is about none.
        pod: the pod on whose behalf.
        driver: the driver concerned.
        attempt: which attempt in a row, counted from 1.
        duration_ms: how long the driver call took.
        detail: an error's text, or what else a reader should know.
    """

    kind: EventKind
    at: datetime
    claim: ClaimRef | None = None
    pod: PodReference | None = None
    driver: DriverName | None = None
    attempt: int | None = None
    duration_ms: int | None = None
    detail: str | None = None
