"""What a manager is to those who embed it, and what it needs from the rooms it is handed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from drastate.model import (
    CallResult,
    ClaimRecord,
    ClaimRef,
    ClaimUID,
    ContainerInfo,
    DriverName,
    Event,
    PodSnapshot,
    PodUID,
)


class Manager(Protocol):
    """The DRA manager of one node. All methods may be called from any thread.

    A *pod* is a ``kubernetes.client.V1Pod``, a mapping in the API's camelCase form, YAML text of
    one Pod, or the path of such a file.

    Source: kubelet ``cm/dra/types.go``, Manager (1.26: one container at a time; 1.27: whole pods).
    """

    def start(self, active_pods: Callable[[], PodSnapshot] | None = None) -> None:
        """Begins to discover drivers and, given ``active_pods``, to reconcile."""

    def prepare_resources(self, pod: Any, container: str) -> ContainerInfo:
        """Prepares the pod's claims and returns what the runtime needs for one container."""

    def prepare_pod_resources(self, pod: Any) -> None:
        """Prepares all claims of the pod."""

    def get_resources(self, pod: Any, container: str) -> ContainerInfo:
        """What the runtime needs for one container of a prepared pod; calls no driver."""

    def unprepare_resources(self, pod: Any) -> None:
        """Lets go of the pod's claims; drivers of claims that no other pod holds are called."""

    def pod_might_need_to_unprepare_resources(self, uid: str) -> bool:
        """Whether the pod still holds a claim, so that it must not vanish yet."""

    def close(self) -> None:
        """Stops; nothing is unprepared. The next manager on the ledger goes on."""


class Drivers(Protocol):
    """The drivers of the node, as the manager sees them (see `drastate.drivers`)."""

    def start(self) -> None:
        """Begins discovery."""

    def close(self) -> None:
        """Ends discovery and every call in flight."""

    def is_registered(self, driver: DriverName) -> bool:
        """Whether a plugin of that driver is registered; waits for the first look, bounded."""

    def explain(self, driver: DriverName) -> str:
        """A short text on the driver's state, for errors."""

    def prepare(
        self, driver: DriverName, claims: Sequence[ClaimRef]
    ) -> Mapping[ClaimUID, CallResult]:
        """One NodePrepareResources call; a result for every claim, never an exception."""

    def unprepare(
        self, driver: DriverName, claims: Sequence[ClaimRef]
    ) -> Mapping[ClaimUID, CallResult]:
        """One NodeUnprepareResources call; a result for every claim, never an exception."""

    def on_registered(self, callback: Callable[[DriverName], None]) -> None:
        """Has ``callback`` called whenever a driver becomes usable (again)."""


class Ledger(Protocol):
    """The claim ledger, as the manager sees it (see `drastate.ledger.claims`)."""

    def find(self, uid: ClaimUID) -> ClaimRecord | None:
        """The record of a claim; None when nothing is held or owed."""

    def named(self, namespace: str, name: str) -> tuple[ClaimRecord, ...]:
        """The records with that name."""

    def of_pod(self, pod_uid: PodUID) -> tuple[ClaimRecord, ...]:
        """The records of the claims a pod holds."""

    def holds(self, pod_uid: PodUID) -> bool:
        """Whether a pod holds any claim."""

    def pods(self) -> tuple[PodUID, ...]:
        """Every pod that holds a claim."""

    def all(self) -> tuple[ClaimRecord, ...]:
        """Every record that is held or owed."""

    def commit(
        self, changes: Sequence[ClaimRecord], events: Sequence[Event] = (), *, durable: bool = True
    ) -> None:
        """Replaces records and appends history, all or nothing."""

    def prune(self, *, tombstone_days: float, tombstones_max: int, events_max: int) -> int:
        """Removes one small batch of old history; how many rows."""

    def close(self) -> None:
        """Notes the clean stop."""
