"""The manager itself: takes pods as users have them, and wires the rooms together."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from drastate.clock import Clock, SystemClock
from drastate.config import KUBELET_PLUGINS_REGISTRY, Settings
from drastate.errors import (
    DrastateError,
    DriverError,
    DriverPermanentError,
    LedgerError,
    LedgerUnwritableError,
    ManagerClosedError,
)
from drastate.kube.pod import parse_pod, parse_pod_uid
from drastate.kube.source import as_claim_source
from drastate.ledger.claims import ClaimLedger
from drastate.ledger.engine import LEDGER_FILE
from drastate.manager import abandon, lookup
from drastate.manager.admission import Admission
from drastate.manager.api import Drivers, Ledger
from drastate.manager.context import Context
from drastate.manager.devices import DeviceHolds
from drastate.manager.lifecycle import owes_call
from drastate.manager.losses import Losses
from drastate.manager.prepare import Preparer
from drastate.manager.reprepare import Repreparer
from drastate.manager.unprepare import Unpreparer
from drastate.model import (
    ClaimState,
    ClaimUID,
    ContainerInfo,
    DriverName,
    Event,
    EventKind,
    Pod,
    PodReference,
    PodSnapshot,
    PodUID,
)
from drastate.reconcile import LivePods, Owed, Reconciler

_log = logging.getLogger(__name__)

#: How long `close` waits for calls that it has cancelled. Arbitrary; they end in milliseconds.
_CLOSE_S = 5.0
#: How many pods' last refusals are remembered, so that a retry repeats neither line nor event.
_REFUSALS_MAX = 1024


class ManagerImpl:
    """The DRA manager of one node; see `drastate.manager.api.Manager`.

    Use it as a context manager, or call `close` at the end. Nothing runs before `start`.
    """

    def __init__(
        self,
        kube_client: Any,
        *,
        state_dir: str | Path | None = None,
        plugins_registry: str | Path = KUBELET_PLUGINS_REGISTRY,
        endpoint_root: str | Path | None = None,
        node_name: str = "",
        settings: Settings | None = None,
        ledger: Ledger | None = None,
        drivers: Drivers | None = None,
        clock: Clock | None = None,
        permanent_error: Callable[[DriverError], bool] | None = None,
    ) -> None:
        """Opens the claim ledger; what an earlier process owes is known from here on.

        Args:
            kube_client: where ResourceClaims are read from: a ``kubernetes.client.ApiClient`` or
                one of the API objects made from it, a folder of manifests (path or
                `ManifestFolder`), or any object with ``get_claim(namespace, name)``.
            state_dir: folder of the ledger; made (mode 0700) when it is missing.
            plugins_registry: folder of the registration sockets; it must exist.
            endpoint_root: folder that every driver's endpoint must lie under; None: the parent of
                ``plugins_registry``, as in the kubelet's layout.
            node_name: recorded in a new ledger, for people.
            settings: see `Settings`.
            ledger: an open ledger instead of the one in ``state_dir``.
            drivers: a `Drivers` instead of the plugins in ``plugins_registry``.
            clock: the time; the system's by default.
            permanent_error: says of a driver's error whether no repetition will ever mend it. Such
                an error is raised as `DriverPermanentError`, and what is owed is not asked for
                again before the driver registers anew. None: every error is taken for temporary,
                as by the kubelet.

        Raises:
            UsageError: an argument cannot be used.
            LedgerBusyError: another manager has the ledger open; the text gives its pid.
            LedgerError: the ledger cannot be opened.

        Source: kubelet ``cm/dra/manager.go``, NewManagerImpl.
        """
        self._clock = clock or SystemClock()
        self._settings = settings or Settings()
        source = as_claim_source(kube_client)
        self._drivers = drivers or self._make_drivers(plugins_registry, endpoint_root)
        self._ledger = ledger or self._open_ledger(state_dir, node_name)
        # Kept: this one method is called for every pod status, so it must stay a look-up.
        self._holds = self._ledger.holds
        known = self._ledger.all()
        context = Context(
            ledger=self._ledger,
            drivers=self._drivers,
            settings=self._settings,
            clock=self._clock,
            boot_id=self._clock.boot_id(),
            losses=Losses(known, clock=self._clock, guard_s=self._settings.late_effect_guard_s),
            holds=DeviceHolds(known),
            is_permanent=permanent_error,
        )
        self._context = context
        self._unpreparer = Unpreparer(context)
        self._preparer = Preparer(context, self._unpreparer)
        self._repreparer = Repreparer(self._preparer.prepare_anew, self._operating, self._clock)
        self._live = LivePods(None, settings=self._settings, clock=self._clock)
        self._admission = Admission(context, source, self._unpreparer)
        self._reconciler: Reconciler | None = None
        self._refusals: OrderedDict[PodUID, str] = OrderedDict()
        self._busy = threading.Condition()
        # Reentrant: a signal handler may close what its thread is closing.
        self._ending = threading.RLock()
        self._operations = 0
        self._state = "new"

    def _make_drivers(self, registry: str | Path, endpoint_root: str | Path | None) -> Drivers:
        # grpc is loaded by who calls drivers, not by who imports the package.
        from drastate.drivers.client import DriverClient  # noqa: PLC0415

        return DriverClient(
            Path(registry),
            endpoint_root=None if endpoint_root is None else Path(endpoint_root),
            settings=self._settings,
            clock=self._clock,
        )

    def _open_ledger(self, state_dir: str | Path | None, node_name: str) -> Ledger:
        if state_dir is None:
            raise ManagerClosedError("ManagerImpl needs state_dir, the folder for its claim ledger")
        folder = Path(state_dir)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerUnwritableError(
                f"state folder {folder} cannot be made: {error.strerror}; choose one that this user"
                " may write",
                path=str(folder),
            ) from error
        return ClaimLedger(
            folder / LEDGER_FILE,
            node_name=node_name,
            busy_timeout_ms=self._settings.busy_timeout_ms,
            clock=self._clock,
        )

    # --- life ---

    def start(self, active_pods: Callable[[], PodSnapshot] | None = None) -> None:
        """Begins to discover drivers and to reconcile.

        Args:
            active_pods: the live pods of the node, asked for once a minute from a thread of ours.
                Only a snapshot with ``complete=True`` can show that a pod is gone. None: no pod is
                ever believed gone; what is owed already is still asked for.

        Raises:
            ManagerClosedError: started twice, or closed.

        Source: kubelet ``Manager.Start``; its ``sourcesReady`` is `PodSnapshot.complete`.
        """
        with self._busy:
            if self._state != "new":
                raise ManagerClosedError(f"the manager cannot be started: it is {self._state}")
            self._state = "started"
        self._live = LivePods(active_pods, settings=self._settings, clock=self._clock)
        self._admission.live = self._live
        self._reconciler = Reconciler(
            _Target(self._context, self._unpreparer),
            self._live,
            settings=self._settings,
            clock=self._clock,
        )
        self._drivers.on_registered(self._reconciler.driver_registered)
        if self._settings.reprepare_on_register:
            self._drivers.on_registered(self._repreparer.driver_registered)
        self._drivers.start()
        self._reconciler.start()

    def close(self) -> None:
        """Stops: cancels driver calls, writes what is known, and lets another manager in.

        Nothing is unprepared. Returns within seconds even when a driver hangs. Idempotent.

        Raises:
            LedgerError: the clean stop could not be recorded; everything is closed all the same.
        """
        # A second caller returns when the first is done: what follows counts on the ledger's lock.
        with self._ending:
            with self._busy:
                if self._state == "closed":
                    return
                self._state = "closed"
            try:
                self._repreparer.close()
                if self._reconciler is not None:
                    self._reconciler.stop()
                self._drivers.close()
                with self._busy:
                    self._busy.wait_for(lambda: self._operations == 0, timeout=_CLOSE_S)
            finally:
                self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except LedgerError as error:
            if kind is None:
                raise
            # What is in flight tells more than that its end could not be recorded.
            _log.warning("the clean stop is not recorded", extra={"error": str(error)})

    @contextmanager
    def _operating(self) -> Iterator[None]:
        with self._busy:
            if self._state != "started":
                hint = "call start() first" if self._state == "new" else "open a new one"
                raise ManagerClosedError(f"the manager is {self._state}: {hint}")
            self._operations += 1
        try:
            yield
        finally:
            with self._busy:
                self._operations -= 1
                self._busy.notify_all()

    # --- the main job ---

    def prepare_resources(self, pod: Any, container: str) -> ContainerInfo:
        """Prepares all claims of the pod and returns what the runtime needs for one container.

        Args:
            pod: see `Manager`.
            container: name of an init, regular or ephemeral container of the pod.

        Returns:
            The CDI devices of exactly the requests that the container names.

        Raises:
            As `prepare_pod_resources` and `get_resources`.

        Source: kubelet 1.26 ``PrepareResources(pod, container)``; all claims: kubelet 1.31+.
        """
        parsed = parse_pod(pod)
        lookup.find_container(parsed, container)
        self._prepare(parsed)
        return lookup.container_info(self._context, parsed, container)

    def prepare_pod_resources(self, pod: Any) -> None:
        """Prepares all claims of the pod: one call per driver, drivers in parallel.

        What is prepared already is not called again, so repeating it is free. When it raises, what
        did succeed is durable, and the next call asks only for the rest.

        Args:
            pod: see `Manager`.

        Raises:
            InvalidPodError: not a pod.
            ClaimError: a claim cannot be used (yet); nothing was recorded.
            ClusterError: a claim could not be read; nothing was recorded.
            DriverNotRegisteredError: a driver is missing; nothing was recorded.
            LedgerError: the ledger cannot be written; no driver was called.
            DriverError: a driver failed; the claim stays PREPARING.
            PrepareError: more than one of these.
            ManagerClosedError: not started, or closed.

        Source: kubelet ``Manager.PrepareResources`` (1.27+).
        """
        self._prepare(parse_pod(pod))

    def _prepare(self, pod: Pod) -> None:
        with self._operating():
            try:
                claims = self._admission.admit(pod)
            except DrastateError as error:
                self._note_refusal(pod, error)
                raise
            self._refusals.pop(pod.uid, None)
            with self._preparing(pod.uid):
                self._preparer.prepare(pod, claims)

    @contextmanager
    def _preparing(self, uid: PodUID) -> Iterator[None]:
        preparing = self._context.preparing
        with self._busy:
            preparing[uid] += 1
        try:
            yield
        finally:
            with self._busy:
                preparing[uid] -= 1
                if not preparing[uid]:
                    del preparing[uid]

    def get_resources(self, pod: Any, container: str) -> ContainerInfo:
        """What the runtime needs for one container of a prepared pod; for a container restart.

        Args:
            pod: see `Manager`.
            container: name of a container of the pod.

        Returns:
            The same as `prepare_resources` returned; no driver is called, no claim is read.

        Raises:
            InvalidPodError: not a pod, or it has no such container.
            ClaimNotCreatedError: the pod's status does not name a claim.
            NotPreparedError: a claim is not prepared for this pod, or was before a reboot.

        Source: kubelet ``Manager.GetResources``.
        """
        parsed = parse_pod(pod)
        lookup.find_container(parsed, container)
        return lookup.container_info(self._context, parsed, container)

    def unprepare_resources(self, pod: Any) -> None:
        """Lets go of all claims of the pod, from the ledger alone.

        Drivers of claims that no other pod holds are called. Repeating it is free.

        Args:
            pod: see `Manager`; its UID is enough, as text or in a pod without spec and status.

        Raises:
            InvalidPodError: no UID in it.
            LedgerError: the ledger cannot be written.
            DriverError: a driver has not confirmed; it is asked again, by the reconcile loop too.
            UnprepareError: more than one of these.
            ManagerClosedError: not started, or closed.

        Source: kubelet ``Manager.UnprepareResources`` (1.37: from its cache alone).
        """
        uid = parse_pod_uid(pod)
        with self._operating():
            self._unpreparer.release(uid)

    def pod_might_need_to_unprepare_resources(self, uid: str) -> bool:
        """Whether the pod still holds a claim, so that it must not vanish yet. One set look-up.

        Source: kubelet ``Manager.PodMightNeedToUnprepareResources``.
        """
        return self._holds(uid)  # type: ignore[arg-type]

    def abandon(self, claim: str, driver: str, *, reason: str, by: str = "an embedder") -> None:
        """Declares that a driver will never confirm: what it owes a claim is owed no more.

        For a driver that was removed for good; whatever it left behind on the node stays there. It
        is written to the history, and never happens by itself.

        Args:
            claim: UID, or "namespace/name".
            driver: the driver's name.
            reason: why, for the history.
            by: who says so, for the history.

        Raises:
            ClaimNotFoundError: nothing is held or owed for the claim.
            ClaimHeldError: a live pod holds it, or the driver owes it nothing.
            ClaimBusyError: the driver is being called for it.
            UsageError: no reason, no such driver, or several claims of that name.
            LedgerError: the ledger cannot be written; nothing is changed.
            ManagerClosedError: not started, or closed.

        Source: ours; upstream tells operators to edit state files (k8s #129402).
        """
        context = self._context
        with self._operating():
            uid = abandon.get_owed(context.ledger, claim).ref.uid
            with context.locks.hold([uid]):
                record = abandon.get_owed(context.ledger, uid)
                if context.in_flight.find(uid, DriverName(driver)) is not None:
                    raise abandon.busy(record, DriverName(driver))
                after, event = abandon.abandoned(
                    record, DriverName(driver), reason=reason, by=by, clock=self._clock
                )
                context.commit([after], [event])

    def on_driver_registered(self, callback: Callable[[DriverName], None]) -> None:
        """Has ``callback`` called, from a thread of ours, whenever a driver becomes usable (again).

        An agent that retries pods with growing pauses ends the pause there. Call it before `start`.
        """
        self._drivers.on_registered(callback)

    def reconcile(self) -> None:
        """One run of the reconcile loop, now; returns when the drivers asked have answered.

        Raises:
            LedgerError: the ledger could not be written.
            ManagerClosedError: not started, or closed.
        """
        with self._operating():
            if self._reconciler is not None:
                self._reconciler.run_once(wait=True)

    def _note_refusal(self, pod: Pod, error: DrastateError) -> None:
        """One line and one history entry at the first refusal of a pod and at each change."""
        text = str(error)
        if self._refusals.get(pod.uid) == text:
            return
        self._refusals[pod.uid] = text
        while len(self._refusals) > _REFUSALS_MAX:
            self._refusals.popitem(last=False)
        _log.warning(
            "a pod's claims cannot be prepared",
            extra={"pod": str(pod), "pod_uid": pod.uid, "error": text},
        )
        now = self._clock.now()
        events = [
            Event(
                EventKind.REFUSED,
                now,
                pod=PodReference(pod.uid, pod.namespace, pod.name),
                driver=getattr(failure, "driver", None),
                detail=failure.message,
            )
            for failure in error.failures
        ]
        try:
            self._ledger.commit([], events, durable=False)
        except LedgerError as unwritable:
            _log.warning("a refusal is not in the history", extra={"error": str(unwritable)})


class _Target:
    """The manager as the reconciler drives it."""

    def __init__(self, context: Context, unpreparer: Unpreparer) -> None:
        self._context = context
        self._unpreparer = unpreparer

    def held_pods(self) -> Collection[PodUID]:
        preparing = self._context.preparing
        return [uid for uid in self._context.ledger.pods() if uid not in preparing]

    def mark_gone(self, pods: Collection[PodUID]) -> None:
        ledger = self._context.ledger
        uids = {record.ref.uid for pod in pods for record in ledger.of_pod(pod)}
        self._unpreparer.mark(sorted(uids), pods)

    def owed(self) -> Sequence[Owed]:
        in_flight = self._context.in_flight
        return [
            Owed(record.ref.uid, name, driver.confirmed_at is not None)
            for record in self._context.ledger.all()
            if not record.active_pods
            for name, driver in record.drivers.items()
            if driver.state is ClaimState.UNPREPARING
            and owes_call(driver)
            and in_flight.find(record.ref.uid, name) is None
        ]

    def is_registered(self, driver: DriverName) -> bool:
        return self._context.drivers.is_registered(driver)

    def settle(self, driver: DriverName, uids: Sequence[ClaimUID]) -> Mapping[ClaimUID, bool]:
        failures = self._unpreparer.call(driver, uids)
        return {
            uid: any(isinstance(error, DriverPermanentError) for error in errors)
            for uid, errors in failures.items()
        }

    def prune(self) -> int:
        settings = self._context.settings
        return self._context.ledger.prune(
            tombstone_days=settings.tombstone_days,
            tombstones_max=settings.tombstones_max,
            events_max=settings.events_max,
        )
