"""What a reader of the ledger is given: frozen rows, joined the way people ask for them.

The field names are also the keys of the command line's JSON and YAML, so renaming one breaks users.
States and kinds are plain strings: a ledger that says something unheard of must still be shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One device of a driver's last complete answer.

    Attributes:
        pool: pool name.
        device: device name.
        share_id: for a device that several claims share, else None.
        request_names: requests of the claim that the device belongs to.
        cdi_device_ids: fully qualified CDI device names.
    """

    pool: str
    device: str
    share_id: str | None
    request_names: tuple[str, ...]
    cdi_device_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DriverRow:
    """One driver of a claim.

    Attributes:
        driver: its name.
        state: PREPARING, PREPARED, UNPREPARING or UNPREPARED.
        since: when it entered that state.
        called: a prepare may have left, so an unprepare is owed.
        unanswered: a prepare got no answer and may still land.
        attempts: calls in a row without success.
        failing_since: first failure of that row.
        last_error: text of the last one.
        boot_id: the boot in which it was prepared.
        skip_prepare: the allocation needs no NodePrepareResources.
        skip_unprepare: the allocation needs no NodeUnprepareResources.
        confirmed_at: first confirmation of an unprepare that needs two.
        devices: the driver's last complete answer.
    """

    driver: str
    state: str
    since: datetime
    called: bool
    unanswered: bool
    attempts: int
    failing_since: datetime | None
    last_error: str | None
    boot_id: str | None
    skip_prepare: bool
    skip_unprepare: bool
    confirmed_at: datetime | None
    devices: tuple[DeviceRow, ...]

    @property
    def owes_unprepare(self) -> bool:
        """Whether NodeUnprepareResources has to be sent before the driver is done."""
        return self.called and not self.skip_unprepare and self.state != "UNPREPARED"

    @property
    def is_awaited(self) -> bool:
        """Whether pods that want to end wait for this driver's confirmation."""
        return self.state == "UNPREPARING" and self.confirmed_at is None


@dataclass(frozen=True, slots=True)
class HolderRow:
    """A pod that holds a claim.

    Attributes:
        uid: the pod's UID.
        namespace: its namespace.
        name: its name.
        releasing: it asked to let go, and not every driver has confirmed yet.
    """

    uid: str
    namespace: str
    name: str
    releasing: bool


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """A claim with everything the ledger says of it now.

    Attributes:
        uid: the ResourceClaim's UID.
        namespace: its namespace.
        name: its name.
        status: PREPARING, PREPARED, UNPREPARING, or UNPREPARED for a tombstone.
        epoch: 1, and one more each time the claim came back after it had been unprepared.
        created_at: when this epoch began.
        changed_at: when the status last changed.
        drivers: by name.
        pods: that hold it, by UID.
    """

    uid: str
    namespace: str
    name: str
    status: str
    epoch: int
    created_at: datetime
    changed_at: datetime
    drivers: tuple[DriverRow, ...]
    pods: tuple[HolderRow, ...]

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ClaimSummary:
    """A claim in a list: only names of what belongs to it.

    Attributes:
        uid: the ResourceClaim's UID.
        namespace: its namespace.
        name: its name.
        status: see `ClaimRow`.
        created_at: see `ClaimRow`.
        drivers: names of its drivers.
        devices: names of its devices.
        pods: names of the pods that hold it.
    """

    uid: str
    namespace: str
    name: str
    status: str
    created_at: datetime
    drivers: tuple[str, ...]
    devices: tuple[str, ...]
    pods: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeldClaimRow:
    """A claim from the side of a pod that holds it.

    Attributes:
        uid: the ResourceClaim's UID.
        namespace: its namespace.
        name: its name.
        status: the claim's.
        releasing: the pod asked to let go of it.
        waiting_for: drivers that must confirm before the pod is free to go.
    """

    uid: str
    namespace: str
    name: str
    status: str
    releasing: bool
    waiting_for: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PodRow:
    """A pod that holds at least one claim.

    Attributes:
        uid: the pod's UID.
        namespace: its namespace.
        name: its name.
        claims: that it holds, by UID.
    """

    uid: str
    namespace: str
    name: str
    claims: tuple[HeldClaimRow, ...]


@dataclass(frozen=True, slots=True)
class EventRow:
    """One entry of the history.

    Attributes:
        id: grows by one; never used twice.
        at: when.
        kind: what happened (see `drastate.model.EventKind`).
        claim_uid: the claim it happened to.
        claim: "namespace/name" of it, as of then.
        pod_uid: the pod on whose behalf.
        pod: "namespace/name" of it.
        driver: the driver concerned.
        attempt: which attempt in a row.
        duration_ms: how long the call took.
        detail: an error's text, or what else there is to know.
    """

    id: int
    at: datetime
    kind: str
    claim_uid: str | None
    claim: str | None
    pod_uid: str | None
    pod: str | None
    driver: str | None
    attempt: int | None
    duration_ms: int | None
    detail: str | None


@dataclass(frozen=True, slots=True)
class LedgerInfo:
    """The ledger about itself.

    Attributes:
        path: the database file.
        uuid: its identity; None when no manager ever finished opening it.
        node_name: the node, as its manager was told.
        schema_revision: of its tables.
        created_at: when it was made.
        opened_at: when a manager last opened it.
        last_clean_stop: when one last closed it.
        boot_id: the boot of that last open.
        in_use: a manager has it open now.
        pid: that manager's, None when it cannot be told.
        size_bytes: of the database file.
        wal_size_bytes: of the write-ahead log beside it; None when there is none.
        claims: how many of each status.
        pods: how many hold a claim.
        events: how many are kept.
        first_event_at: the oldest of them.
        last_event_at: the newest of them.
    """

    path: Path
    uuid: str | None
    node_name: str | None
    schema_revision: str
    created_at: datetime | None
    opened_at: datetime | None
    last_clean_stop: datetime | None
    boot_id: str | None
    in_use: bool
    pid: int | None
    size_bytes: int
    wal_size_bytes: int | None
    claims: dict[str, int]
    pods: int
    events: int
    first_event_at: datetime | None
    last_event_at: datetime | None

    @property
    def was_closed_cleanly(self) -> bool:
        """Whether the last manager that opened it also closed it."""
        if self.opened_at is None:
            return False
        return self.last_clean_stop is not None and self.last_clean_stop >= self.opened_at


@dataclass(frozen=True, slots=True)
class Problem:
    """A row, or a value, that cannot be read. The others are given all the same.

    Attributes:
        subject: where it is, such as "claim <uid>".
        text: what is wrong.
    """

    subject: str
    text: str
