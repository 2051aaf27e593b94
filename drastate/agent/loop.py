"""Keeps the node as the folder says: what is in it is prepared, what has left it is unprepared."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from drastate.agent.device_files import DeviceFiles
from drastate.agent.folder import FolderView, WatchedFolder
from drastate.clock import Clock
from drastate.errors import DrastateError, DriverPermanentError
from drastate.kube.manifests import ManifestScan
from drastate.manager.api import Manager
from drastate.model import Pod, PodUID

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
#: The pause after a look is at least so many times what the look took: a tenth of a percent of a
#: core. It shows from some 200 files on: 1,000 of them are looked at every five seconds.
_REST = 1000.0
#: But no more than this: on a busy machine a look takes long without using much.
_REST_MAX_S = 5.0


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
    lane: frozenset[str] = frozenset()

    @property
    def has_work(self) -> bool:
        return self.leaves or (self.wanted is not None and self.prepared != self.wanted)


class ManifestAgent:
    """The loop over a folder of manifests."""

    def __init__(
        self,
        manager: Manager,
        folder: WatchedFolder,
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
        self._last_view: FolderView | None = None
        self._wake = threading.Event()
        self._stopped = False
        self._problems: tuple[str, ...] = ()

    def run(self) -> None:
        """Works until `stop`; calls in flight are the manager's to end."""
        next_look = 0.0
        while not self._stopped:
            self._wake.clear()
            started = self._clock.monotonic()
            if started >= next_look:
                self.look()
                took_s = self._clock.monotonic() - started
                rest_s = min(_REST_MAX_S, _REST * took_s)
                next_look = started + max(self._scan_interval_s, rest_s)
            self.start_due()
            self._clock.wait(self._wake, next_look - self._clock.monotonic())

    def stop(self) -> None:
        """Ends `run`, from any thread or a signal handler."""
        self._stopped = True
        self._wake.set()

    def look(self) -> None:
        """One look at the folder: notes which pods are wanted, and which have left."""
        view = self._folder.look()
        if view is not self._last_view:
            self._report(view.scan)
        with self._mutex:
            self._note_wanted(view)

    def start_due(self) -> None:
        """Starts whatever is due, each pod in a thread of its own."""
        with self._mutex:
            jobs = self._due_jobs()
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

    def _note_wanted(self, view: FolderView) -> None:
        if view is not self._last_view:
            self._last_view = view
            for uid, pod in view.pods.items():
                work = self._pods.setdefault(uid, _PodWork())
                work.wanted, work.leaves, work.missed = pod, False, 0
                work.due, work.pause_s = 0.0, 0.0
                work.lane = view.drivers_of(pod)
        if not view.scan.complete:
            return
        enough = _SCANS_AGREE if view.pods else _SCANS_AGREE_EMPTY
        for uid in self._pods.keys() - view.pods.keys():
            work = self._pods[uid]
            work.missed += 1
            if work.missed >= enough and not work.leaves:
                work.wanted, work.leaves = None, True
                work.due, work.pause_s = 0.0, 0.0

    def driver_registered(self, _: str) -> None:
        """Has every pod that failed tried again at the next look: a driver is back."""
        with self._mutex:
            self._end_pauses()
        self._wake.set()

    def _end_pauses(self) -> None:
        for work in self._pods.values():
            work.due, work.pause_s = 0.0, 0.0

    def _due_jobs(self) -> list[tuple[PodUID, Callable[[], None]]]:
        now = self._clock.monotonic()
        at_work = Counter(work.lane for work in self._pods.values() if work.busy)
        jobs: list[tuple[PodUID, Callable[[], None]]] = []
        for uid, work in self._pods.items():
            if work.busy or work.due > now or not work.has_work:
                continue
            if at_work[work.lane] >= _AT_ONCE:
                continue
            at_work[work.lane] += 1
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
            if all(isinstance(each, DriverPermanentError) for each in error.failures):
                self._failed(uid, str(error), "a pod's driver has to return first", math.inf)
            else:
                self._failed(uid, str(error), "a pod's resources are not ready, will retry")
        except Exception as error:  # noqa: BLE001 (told, and tried again; the loop must live)
            _log.exception("a pod could not be handled, please report this", extra={"pod_uid": uid})
            self._failed(uid, repr(error), "a pod could not be handled, will retry")
        else:
            self._succeeded(uid, prepared)
        self._wake.set()

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
                # Others may have waited for a device or a claim that this pod held.
                self._end_pauses()
        if prepared is None:
            _log.info("a pod left and its claims are unprepared", extra={"pod_uid": uid})
        else:
            _log.info("a pod's resources are ready", extra={"pod_uid": uid, "pod": str(prepared)})

    def _failed(self, uid: PodUID, error: str, message: str, pause_s: float | None = None) -> None:
        with self._mutex:
            work = self._pods[uid]
            work.busy = False
            work.pause_s = min(_PAUSE_MAX_S, 2 * work.pause_s or _PAUSE_FIRST_S)
            work.due = self._clock.monotonic() + (pause_s or work.pause_s)
            is_news = work.last_error != error
            work.last_error = error
        if is_news:
            # The manager has told what is wrong; this tells what the agent does about it.
            _log.info(message, extra={"pod_uid": uid, "error": error})
