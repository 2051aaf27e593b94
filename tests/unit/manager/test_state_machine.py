"""Random schedules against a small model of what drivers hold: hypothesis looks for the bad one.

The ledger is the real one, on disk; the drivers are a model in memory that answers, refuses, loses
answers, and lets lost calls land later. A restart is a new manager on the same file; a crash is one
in which the last driver call is never recorded.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from manager_node import Claims, make_claim, make_pod, result

from drastate import ManagerImpl, PodSnapshot, Settings
from drastate.clock import SystemClock
from drastate.errors import DrastateError, DriverRefusedError, DriverUnavailableError
from drastate.ledger import rows
from drastate.ledger.claims import ClaimLedger
from drastate.ledger.engine import open_reader
from drastate.model import CallResult, ClaimRef, ClaimState, ClaimUID, DriverName, PreparedDevice
from drastate.reconcile import Reconciler

DRIVERS = ("g.example.com", "n.example.com")
CLAIMS = {"one": DRIVERS[:1], "two": DRIVERS[1:], "both": DRIVERS}
PODS = ("p1", "p2", "p3")
ANSWERS = ("ok", "refuses", "answer lost", "call lost", "lands late", "not sent")
SETTINGS = Settings(
    snapshot_spacing_s=1e-6, late_effect_guard_s=0.001, reconcile_period_s=3600, confirm_gone_s=3600
)


class Crash(BaseException):
    """The process dies here."""


class ModelDrivers:
    """Drivers as the node sees them: they outlive the managers."""

    def __init__(self, check_call: Callable[[str, str, ClaimUID], None]) -> None:
        self.answers: dict[str, str] = dict.fromkeys(DRIVERS, "ok")
        self.held: set[tuple[str, ClaimUID]] = set()
        self.late: list[tuple[str, ClaimUID]] = []
        self.crash_at: str | None = None
        self._check_call = check_call

    def start(self) -> None: ...
    def close(self) -> None: ...
    def on_registered(self, callback: Callable[[DriverName], None]) -> None: ...
    def explain(self, driver: DriverName) -> str:
        return "not registered"

    def is_registered(self, driver: DriverName) -> bool:
        return True

    def prepare(self, driver: DriverName, claims: Sequence[ClaimRef]) -> Mapping:
        return {ref.uid: self._call("prepare", driver, ref) for ref in claims}

    def unprepare(self, driver: DriverName, claims: Sequence[ClaimRef]) -> Mapping:
        return {ref.uid: self._call("unprepare", driver, ref) for ref in claims}

    def _call(self, what: str, driver: DriverName, ref: ClaimRef) -> CallResult:
        answer = self.answers[driver]
        lost = DriverUnavailableError("lost", driver=driver)
        if answer == "not sent":
            return CallResult(error=lost, called=False)
        self._check_call(what, driver, ref.uid)
        if self.crash_at == "before":
            raise Crash
        key = (driver, ref.uid)
        if answer == "refuses":
            return CallResult(error=DriverRefusedError("no", driver=driver))
        if answer == "lands late" and what == "prepare":
            self.late.append(key)
        elif answer != "call lost" and what == "prepare":
            self.held.add(key)
        elif answer not in ("call lost", "lands late"):
            self.held.discard(key)
        if self.crash_at == "after":
            raise Crash
        if answer != "ok":
            return CallResult(error=lost, answered=False)
        device = PreparedDevice("pool", "d", None, (), (f"x.com/c={ref.name}",))
        return CallResult(devices=(device,) if what == "prepare" else ())


class ManagerMachine(RuleBasedStateMachine):
    """Pods come and go, drivers misbehave, the process dies."""

    @initialize()
    def open_node(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="drastate-test-"))
        self.claims = Claims()
        for name, drivers in CLAIMS.items():
            results = [result(driver, "d", "r") for driver in drivers]
            self.claims.put(make_claim(f"uid-{name}", name, results, PODS))
        self.drivers = ModelDrivers(self.check_call)
        self.wanted: dict[str, str] = {}
        self.boot = "boot"
        self.manager: ManagerImpl | None = None
        self.open_manager()

    def open_manager(self) -> None:
        clock = SystemClock()
        clock.boot_id = lambda boot=self.boot: boot  # type: ignore[method-assign]
        self.ledger = ClaimLedger(self.root / "ledger.db", clock=clock)
        self.manager = ManagerImpl(
            self.claims,
            ledger=self.ledger,
            drivers=self.drivers,
            settings=SETTINGS,
            clock=clock,
            plugins_registry=self.root,
        )
        with pytest.MonkeyPatch.context() as patch:
            # The loop's own thread would make a schedule differ from run to run.
            patch.setattr(Reconciler, "start", lambda _: None)
            self.manager.start(lambda: PodSnapshot({*self.wanted, "other"}, complete=True))

    def lose_process(self) -> None:
        """Death: nothing is closed in order; only the kernel takes back locks and descriptors."""
        self.manager._reconciler.stop()
        self.ledger._engine.dispose()
        self.ledger._lock.release()
        self.ledger._closed = True
        self.open_manager()

    def teardown(self) -> None:
        if not hasattr(self, "root"):
            return
        self.wanted = {}
        self.drivers.answers = dict.fromkeys(DRIVERS, "ok")
        self.drivers.crash_at = None
        for _ in range(12):
            self.land_late()
            for driver in DRIVERS:  # a driver that comes back ends the pauses between attempts
                self.manager._reconciler.driver_registered(DriverName(driver))
            time.sleep(0.002)
            self.manager.reconcile()
        # I2: whatever may have been prepared is unprepared once no pod needs it.
        assert self.drivers.held == set()
        assert self.ledger.all() == ()
        self.manager.close()
        shutil.rmtree(self.root)

    # --- what must hold ---

    def check_call(self, what: str, driver: str, uid: ClaimUID) -> None:
        record = ClaimRecordOnDisk(self.ledger, uid)
        if what == "prepare":
            # I1: claim, driver and a pod are in the ledger before the call.
            assert record.state(driver) in (ClaimState.PREPARING, ClaimState.PREPARED)
            assert record.active
        else:
            # I3: nobody holds what is taken away.
            assert record.state(driver) is ClaimState.UNPREPARING
            assert not record.active

    @invariant()
    def prepared_is_held(self) -> None:
        """What the ledger calls PREPARED in this boot, the driver holds."""
        if self.manager is None:
            return
        for record in self.ledger.all():
            for driver, known in record.drivers.items():
                if known.state is ClaimState.PREPARED and known.boot_id == self.boot:
                    assert (driver, record.ref.uid) in self.drivers.held

    @invariant()
    def memory_is_the_file(self) -> None:
        """I6: what memory shows is what a new process would read."""
        if self.manager is None:
            return
        connection = open_reader(self.ledger.path)
        records, problems = rows.read_unsettled(connection)
        connection.close()
        connection.engine.dispose()
        assert problems == {}
        assert {r.ref.uid: r for r in records} == {r.ref.uid: r for r in self.ledger.all()}

    # --- what happens ---

    def attempt(self, action: Callable[[], object]) -> bool:
        try:
            action()
        except DrastateError:
            return False
        except Crash:
            self.drivers.crash_at = None
            self.lose_process()
            return False
        return True

    @rule(pod=st.sampled_from(PODS), claim=st.sampled_from(sorted(CLAIMS)))
    def prepare(self, pod: str, claim: str) -> None:
        claim = self.wanted.setdefault(pod, claim)
        if self.attempt(lambda: self.manager.prepare_pod_resources(make_pod(pod, claim))):
            # Devices are handed out only for what the driver holds now.
            info = self.manager.get_resources(make_pod(pod, claim), "main")
            assert info.cdi_devices == (f"x.com/c={claim}",)
            for driver in CLAIMS[claim]:
                assert (driver, f"uid-{claim}") in self.drivers.held

    @rule(pod=st.sampled_from(PODS))
    def unprepare(self, pod: str) -> None:
        self.wanted.pop(pod, None)
        if self.attempt(lambda: self.manager.unprepare_resources(pod)):
            assert not self.manager.pod_might_need_to_unprepare_resources(pod)

    @rule(pod=st.sampled_from(PODS))
    def pod_vanishes(self, pod: str) -> None:
        self.wanted.pop(pod, None)

    @rule()
    def reconcile(self) -> None:
        crash_at, self.drivers.crash_at = self.drivers.crash_at, None
        self.attempt(self.manager.reconcile)
        self.drivers.crash_at = crash_at

    @rule(driver=st.sampled_from(DRIVERS), answer=st.sampled_from(ANSWERS))
    def driver_turns(self, driver: str, answer: str) -> None:
        self.drivers.answers[driver] = answer

    @rule()
    def restart(self) -> None:
        self.manager.close()
        self.open_manager()

    @rule(at=st.sampled_from(["before", "after"]))
    def next_call_kills(self, at: str) -> None:
        self.drivers.crash_at = at

    @rule()
    def reboot(self) -> None:
        """Another boot: what drivers had set up is gone, and calls under way with it."""
        self.manager.close()
        self.boot += "+"
        self.drivers.held.clear()
        self.drivers.late.clear()
        self.open_manager()

    @precondition(lambda self: self.drivers.late)
    @rule()
    def land_late(self) -> None:
        """A prepare that got no answer takes effect now."""
        self.drivers.held.update(self.drivers.late)
        self.drivers.late.clear()


class ClaimRecordOnDisk:
    """A claim as the file has it, asked through the writer's connection."""

    def __init__(self, ledger: ClaimLedger, uid: ClaimUID) -> None:
        self._states: dict[str, ClaimState] = {}
        record = ledger.find(uid)
        assert record is not None
        self._states = {name: driver.state for name, driver in record.drivers.items()}
        self.active = bool(record.active_pods)

    def state(self, driver: str) -> ClaimState:
        return self._states[driver]


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
