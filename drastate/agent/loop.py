"""Keeps the node as the folder says: what is in it is prepared, what has left it is unprepared."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from drastate.agent.device_files import DeviceFiles
from drastate.clock import Clock
from drastate.errors import DrastateError
from drastate.kube.manifests import ManifestFolder, ManifestScan
from drastate.manager.api import Manager
from drastate.model import Pod, PodSnapshot, PodUID

_log = logging.getLogger(__name__)

#: Complete scans in a row that must miss a pod before it counts as removed: an editor that saves a
#: file by removing and making it again passes through a moment without it.
_SCANS_AGREE = 2
#: Likewise when all pods are missing at once, which a tool that refills the folder also looks like.
_SCANS_AGREE_EMPTY = 4
#: Pause after a pod's first failure, doubled up to the most. Arbitrary; a change in the folder or a
#: driver's return ends it early.
_PAUSE_FIRST_S = 1.0
_PAUSE_MAX_S = 60.0
#: Pods of the same drivers that are worked on at once. Arbitrary. Pods of other drivers are not
#: counted, so that a driver that hangs never uses up their turns.
_AT_ONCE = 16


@dataclass(slots=True)
class _PodWork:
    """Where one pod stands."""

    wanted: Pod | None = None
    prepared: Pod | None = None
    leaves: bool = False
    missed: int = 0
    busy: bool = False
    due: float = 0.0
    pause_s: float = 0.0
    last_error: str | None = None

    @property
    def has_work(self) -> bool:
        return self.leaves or (self.wanted is not None and self.prepared != self.wanted)


class ManifestAgent:
    """The loop over a folder of manifests."""

    def __init__(
        self,
        manager: Manager,
        folder: ManifestFolder,
        files: DeviceFiles,
        *,
        clock: Clock,
        scan_interval_s: float,
    ) -> None:
        """Takes the rooms it works with; all are started and closed by the caller.

        Args:
            manager: prepares and unprepares.
            folder: what is wanted.
            files: what the runtime reads.
            clock: the time.
            scan_interval_s: pause between two looks at the folder.
        """
        self._manager = manager
        self._folder = folder
        self._files = files
        self._clock = clock
        self._scan_interval_s = scan_interval_s
        self._mutex = threading.Lock()
        # A pod with a device file was prepared by an earlier run: if it left the folder since, it
        # is unprepared like one that leaves now.
        self._pods: dict[PodUID, _PodWork] = {uid: _PodWork() for uid in files.pods()}
        self._last_seen: object = None
        self._problems: tuple[str, ...] = ()

    def active_pods(self) -> PodSnapshot:
        """The live pods for the reconcile loop: those in the folder now."""
        scan = self._folder.scan()
        return PodSnapshot({each.pod.uid for each in scan.pods}, complete=scan.complete)

    def run(self, stop: threading.Event) -> None:
        """Works until ``stop`` is set; calls in flight are the manager's to end."""
        while not stop.is_set():
            self.step()
            self._clock.wait(stop, self._scan_interval_s)

    def step(self) -> None:
        """One look at the folder, and whatever is due after it, started in threads of their own."""
        scan = self._folder.scan()
        self._report(scan)
        seen = (scan.pods, scan.claims)
        changed = seen != self._last_seen
        self._last_seen = seen
        drivers = _drivers_by_pod(scan)
        with self._mutex:
            self._note_wanted(scan, retry_now=changed)
            jobs = self._due_jobs(drivers)
        for uid, job in jobs:
            threading.Thread(target=job, name=f"drastate-pod-{uid}", daemon=True).start()

    def _report(self, scan: ManifestScan) -> None:
        """One line for each problem of the folder when it appears, and one when all are gone."""
        problems = tuple(sorted(str(problem) for problem in scan.problems))
        for problem in problems:
            if problem not in self._problems:
                _log.error(
                    "a manifest cannot be used; no pod is taken for removed until it is mended",
                    extra={"error": problem},
                )
        if self._problems and not problems:
            _log.info("every manifest can be used again")
        self._problems = problems

    def _note_wanted(self, scan: ManifestScan, *, retry_now: bool) -> None:
        wanted = {each.pod.uid: each.pod for each in scan.pods}
        for uid, pod in wanted.items():
            work = self._pods.setdefault(uid, _PodWork())
            work.wanted, work.leaves, work.missed = pod, False, 0
            if retry_now:
                work.due, work.pause_s = 0.0, 0.0
        if not scan.complete:
            return
        enough = _SCANS_AGREE if wanted else _SCANS_AGREE_EMPTY
        for uid in self._pods.keys() - wanted.keys():
            work = self._pods[uid]
            work.missed += 1
            if work.missed >= enough and not work.leaves:
                work.wanted, work.leaves = None, True
                work.due, work.pause_s = 0.0, 0.0

    def driver_registered(self, _: str) -> None:
        """Has every pod that failed tried again at the next look: a driver is back."""
        with self._mutex:
            for work in self._pods.values():
                work.due, work.pause_s = 0.0, 0.0

    def _due_jobs(
        self, drivers: dict[PodUID, frozenset[str]]
    ) -> list[tuple[PodUID, Callable[[], None]]]:
        now = self._clock.monotonic()
        at_work = Counter(drivers.get(uid) for uid, work in self._pods.items() if work.busy)
        jobs: list[tuple[PodUID, Callable[[], None]]] = []
        for uid, work in self._pods.items():
            if work.busy or work.due > now or not work.has_work:
                continue
            lane = drivers.get(uid)
            if at_work[lane] >= _AT_ONCE:
                continue
            at_work[lane] += 1
            work.busy = True
            job: Callable[[], Pod | None] = partial(self._unprepare, uid)
            if work.wanted is not None:
                job = partial(self._prepare, work.wanted)
            jobs.append((uid, partial(self._do, uid, job)))
        return jobs

    # --- in threads of their own ---

    def _do(self, uid: PodUID, job: Callable[[], Pod | None]) -> None:
        try:
            prepared = job()
        except DrastateError as error:
            self._failed(uid, str(error), "a pod's resources are not ready, will retry")
        except Exception as error:
            _log.exception("a pod could not be handled, please report this", extra={"pod_uid": uid})
            self._failed(uid, repr(error), "a pod could not be handled, will retry")
        else:
            self._succeeded(uid, prepared)

    def _prepare(self, pod: Pod) -> Pod:
        self._manager.prepare_pod_resources(pod)
        self._files.write(
            pod,
            {
                container.name: self._manager.get_resources(pod, container.name)
                for container in pod.containers
            },
        )
        return pod

    def _unprepare(self, uid: PodUID) -> None:
        self._files.remove(uid)
        self._manager.unprepare_resources(uid)

    def _succeeded(self, uid: PodUID, prepared: Pod | None) -> None:
        with self._mutex:
            work = self._pods[uid]
            work.busy = False
            work.prepared = prepared
            work.due = work.pause_s = 0.0
            work.last_error = None
            if prepared is None and work.leaves:
                del self._pods[uid]
        if prepared is None:
            _log.info("a pod left and its claims are unprepared", extra={"pod_uid": uid})
        else:
            _log.info("a pod's resources are ready", extra={"pod_uid": uid, "pod": str(prepared)})

    def _failed(self, uid: PodUID, error: str, message: str) -> None:
        with self._mutex:
            work = self._pods[uid]
            work.busy = False
            work.pause_s = min(_PAUSE_MAX_S, 2 * work.pause_s or _PAUSE_FIRST_S)
            work.due = self._clock.monotonic() + work.pause_s
            is_news = work.last_error != error
            work.last_error = error
        if is_news:
            # The manager has told what is wrong; this tells what the agent does about it.
            _log.info(message, extra={"pod_uid": uid, "error": error})


def _drivers_by_pod(scan: ManifestScan) -> dict[PodUID, frozenset[str]]:
    """The drivers that each pod's claims need, as far as the folder tells."""
    by_claim = {
        (each.claim.ref.namespace, each.claim.ref.name): {
            device.driver for device in each.claim.allocation or ()
        }
        for each in scan.claims
    }
    return {
        each.pod.uid: frozenset(
            driver
            for entry in each.pod.claims
            for driver in by_claim.get((each.pod.namespace, entry.claim_name or ""), ())
        )
        for each in scan.pods
    }
