"""Unprepares what no live pod holds, and asks again until every driver has confirmed.

Kubelet: ``reconcileLoop`` of ``cm/dra/manager.go``. Unlike it, a pod is believed gone only when
complete snapshots agree, a driver that hangs holds up no other, and what a driver owes is asked for
the moment it registers.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from drastate.clock import Clock
from drastate.config import Settings
from drastate.errors import DrastateError
from drastate.model import ClaimUID, DriverName, PodSnapshot, PodUID

_log = logging.getLogger(__name__)

#: Complete snapshots in a row that must miss a pod before it is believed gone.
_AGREE = 2
#: Shortest sleep of the loop. Arbitrary; keeps a mistake in a due time from becoming a busy loop.
_MIN_PAUSE_S = 0.02
#: Likewise when they show no pod at all: what an unmounted folder or a lost cache also looks like.
_AGREE_EMPTY = 3


class LivePods:
    """Which pods are gone for certain.

    Source: DESIGN, "Live pods"; k8s clients that answered a failed listing with an empty list
        (C113).
    """

    def __init__(
        self, source: Callable[[], PodSnapshot] | None, *, settings: Settings, clock: Clock
    ) -> None:
        """Remembers where to ask; None: nobody can tell, so no pod is ever believed gone."""
        self._source = source
        self._spacing_s = settings.snapshot_spacing_s
        self._patience_s = settings.call_timeout_s
        self._clock = clock
        self._counted_at = -math.inf
        self._mutex = threading.Lock()
        self._missed: dict[PodUID, int] = {}

    def gone(self, held: Collection[PodUID]) -> frozenset[PodUID]:
        """Takes one snapshot; the pods of ``held`` that enough of them in a row have missed."""
        if not self._mutex.acquire(timeout=self._patience_s):
            _log.warning("the live pods are still being listed; no pod is taken for gone")
            return frozenset()
        try:
            snapshot = self._take()
            if snapshot is None:
                self._missed = {}
                return frozenset()
            live = set(snapshot.uids)
            # Looks close together, from several threads say, are one opinion and not two.
            now = self._clock.monotonic()
            counts = int(now - self._counted_at >= self._spacing_s)
            self._counted_at = now if counts else self._counted_at
            missed = self._missed
            self._missed = {
                uid: max(1, missed.get(uid, 0) + counts) for uid in held if uid not in live
            }
            enough = _AGREE if live else _AGREE_EMPTY
            return frozenset(uid for uid, times in self._missed.items() if times >= enough)
        finally:
            self._mutex.release()

    def suspects(self, pods: Collection[PodUID]) -> bool:
        """Whether the last snapshot missed all of ``pods``, so that the next may show them gone."""
        return all(uid in self._missed for uid in pods)

    @property
    def has_suspects(self) -> bool:
        """Whether a pod was missed, so that another snapshot soon would help."""
        return bool(self._missed)

    def _take(self) -> PodSnapshot | None:
        if self._source is None:
            return None
        try:
            snapshot = self._source()
        except Exception as error:  # noqa: BLE001 (the embedder's code; whatever fails means "unknown")
            _log.warning(
                "the live pods could not be listed; nothing is unprepared on their account",
                extra={"error": repr(error)},
            )
            return None
        if not isinstance(snapshot, PodSnapshot) or not snapshot.complete:
            _log.debug("the list of live pods is not complete; nothing is unprepared")
            return None
        return snapshot


@dataclass(frozen=True, slots=True)
class Owed:
    """One NodeUnprepareResources that a driver has yet to confirm.

    Attributes:
        uid: the claim.
        driver: the driver.
        confirmed: it has confirmed once; the second time, after the guard, is the last.
    """

    uid: ClaimUID
    driver: DriverName
    confirmed: bool


class Target(Protocol):
    """What the reconciler drives: the manager."""

    def held_pods(self) -> Collection[PodUID]:
        """Pods that hold claims."""

    def mark_gone(self, pods: Collection[PodUID]) -> None:
        """Records that pods are gone, and what follows from it; calls no driver."""

    def owed(self) -> Sequence[Owed]:
        """Every unprepare that is owed and that nobody works on."""

    def is_registered(self, driver: DriverName) -> bool:
        """Whether the driver can be called."""

    def settle(self, driver: DriverName, uids: Sequence[ClaimUID]) -> Mapping[ClaimUID, bool]:
        """Asks a driver to unprepare claims; those that failed, and whether for good."""

    def prune(self) -> int:
        """Removes a little old history; how many rows."""


@dataclass(slots=True)
class _Pause:
    due: float
    delay_s: float


class Reconciler:
    """A loop in a daemon thread, and one more for each driver that is being asked."""

    def __init__(self, target: Target, live: LivePods, *, settings: Settings, clock: Clock) -> None:
        self._target = target
        self._live = live
        self._settings = settings
        self._clock = clock
        self._mutex = threading.Lock()
        self._pauses: dict[tuple[ClaimUID, DriverName], _Pause] = {}
        self._asking: dict[DriverName, threading.Thread] = {}
        self._next_look = 0.0
        self._next_due = math.inf
        self._wake = threading.Event()
        self._stopped = False
        self._looking: threading.Thread | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the loop; its first run is at once."""
        self._thread = threading.Thread(target=self._loop, name="drastate-reconcile", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Ends the loop; driver calls in flight are the drivers' room to end."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def driver_registered(self, driver: DriverName) -> None:
        """What this driver owes is asked for at once: its pauses no longer count."""
        with self._mutex:
            for uid, name in list(self._pauses):
                pause = self._pauses[uid, name]
                if name == driver and pause.delay_s:
                    del self._pauses[uid, name]
        self._wake.set()

    def run_once(self, *, wait: bool = False) -> None:
        """One run, with a look at the live pods.

        Args:
            wait: return when every driver asked has answered.

        Raises:
            LedgerError: the ledger could not be written.
        """
        self._look()
        self._ask_drivers(wait=wait)
        while self._target.prune() and not self._stopped:
            pass

    def _look(self) -> None:
        gone = self._live.gone(self._target.held_pods())
        pause_s = self._settings.reconcile_period_s
        if self._live.has_suspects:
            pause_s = min(pause_s, self._settings.confirm_gone_s)
        self._next_look = self._clock.monotonic() + pause_s
        if gone:
            _log.info("pods are gone without a word", extra={"pod_uids": sorted(gone)})
            self._target.mark_gone(gone)

    def _start_look(self) -> None:
        """Looks in a thread of its own: a listing that hangs holds up no driver's duty."""
        self._next_look = self._clock.monotonic() + self._settings.reconcile_period_s
        if self._looking is None or not self._looking.is_alive():
            self._looking = threading.Thread(
                target=self._look_and_wake, name="drastate-look", daemon=True
            )
            self._looking.start()

    def _look_and_wake(self) -> None:
        try:
            self._look()
        except DrastateError as error:
            _log.warning("live pods were not compared, will retry", extra={"error": str(error)})
        except Exception:  # noqa: BLE001 (told, and tried again)
            _log.exception("live pods were not compared, will retry; please report this")
        self._wake.set()

    def _loop(self) -> None:
        while not self._stopped:
            self._wake.clear()
            try:
                if self._clock.monotonic() >= self._next_look:
                    self._start_look()
                self._ask_drivers(wait=False)
                while self._target.prune() and not self._stopped:
                    pass
            except DrastateError as error:
                _log.warning("reconcile did not finish, will retry", extra={"error": str(error)})
            except Exception:  # noqa: BLE001 (told, and tried again; the loop must live)
                _log.exception("reconcile failed, will retry; please report this")
            next_time = min(self._next_look, self._next_due)
            self._clock.wait(self._wake, max(_MIN_PAUSE_S, next_time - self._clock.monotonic()))

    def _ask_drivers(self, *, wait: bool) -> None:
        due = self._due()
        for driver, uids in due.items():
            thread = threading.Thread(
                target=self._ask,
                args=(driver, uids),
                name=f"drastate-settle-{driver}",
                daemon=True,
            )
            with self._mutex:
                if driver in self._asking:
                    continue
                self._asking[driver] = thread
            try:
                thread.start()
            except BaseException:
                with self._mutex:
                    del self._asking[driver]
                raise
        if wait:
            with self._mutex:
                asking = list(self._asking.values())
            for thread in asking:
                thread.join()

    def _due(self) -> dict[DriverName, list[ClaimUID]]:
        """What is owed now, by driver. Forgets the pauses of what is owed no more."""
        owed = self._target.owed()
        now = self._clock.monotonic()
        due: dict[DriverName, list[ClaimUID]] = {}
        reachable = {
            driver: self._target.is_registered(driver) for driver in {each.driver for each in owed}
        }
        with self._mutex:
            self._next_due = math.inf
            known = {(each.uid, each.driver) for each in owed}
            for key in [key for key in self._pauses if key not in known]:
                del self._pauses[key]
            for each in owed:
                key = (each.uid, each.driver)
                if each.confirmed and key not in self._pauses:
                    guard_s = self._settings.late_effect_guard_s
                    self._pauses[key] = _Pause(now + guard_s, 0.0)
                pause = self._pauses.get(key)
                if not reachable[each.driver]:
                    # Nobody to ask: its registration will wake the loop.
                    continue
                if pause is None or pause.due <= now:
                    due.setdefault(each.driver, []).append(each.uid)
                else:
                    self._next_due = min(self._next_due, pause.due)
        return due

    def _ask(self, driver: DriverName, uids: Sequence[ClaimUID]) -> None:
        failed: Mapping[ClaimUID, bool] = {}
        try:
            failed = self._target.settle(driver, uids)
        except DrastateError as error:
            failed = dict.fromkeys(uids, False)
            _log.warning(
                "claims could not be settled, will retry",
                extra={"driver": driver, "error": str(error)},
            )
        except Exception:  # noqa: BLE001 (likewise)
            failed = dict.fromkeys(uids, False)
            _log.exception("settling claims failed; please report this", extra={"driver": driver})
        finally:
            self._set_pauses(driver, uids, failed)
            self._wake.set()

    def _set_pauses(
        self, driver: DriverName, uids: Sequence[ClaimUID], failed: Mapping[ClaimUID, bool]
    ) -> None:
        most = self._settings.retry_owed_max_s
        with self._mutex:
            del self._asking[driver]
            now = self._clock.monotonic()
            for uid in uids:
                old = self._pauses.pop((uid, driver), None)
                if uid in failed:
                    delay_s = min(most, 2 * (old.delay_s if old else 0.0) or 1.0)
                    # Never less than the pause: at its longest the rate is a promise.
                    due = now + self._clock.jitter(1.0, 1.2) * delay_s
                    if failed[uid]:
                        due = math.inf
                    self._pauses[uid, driver] = _Pause(due, delay_s)
