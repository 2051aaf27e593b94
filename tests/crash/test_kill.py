"""The agent is killed with SIGKILL at every crash point and must know what it owes.

The drivers live in this process and outlive the agent, as on a node: what they say they received
and hold is the measure.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from scenario import CLAIMS, DRIVERS, POD, POD_OBJECT, SETTINGS, FolderClaims

from drastate import ManagerImpl, PodSnapshot, faults
from drastate.testing.driver import FakeDriver, node_root

POINTS = {
    scenario: [point for point in faults.POINTS if scenario == "life" or "unprepare" not in point]
    for scenario in ("prepare", "life")
}
#: More hits of one point than any scenario has.
HITS_MAX = 40


class Node:
    """Drivers that outlive the agents."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root = root
        self.drivers = {
            name: stack.enter_context(FakeDriver(root / "plugins_registry", name))
            for name in DRIVERS
        }

    def run_child(self, scenario: str, point: str, hit: int) -> int:
        """Runs an agent that may die; its exit status, negative for a signal."""
        script = Path(__file__).with_name("crash_child.py")
        done = subprocess.run(
            [sys.executable, script, self.root, scenario, point, str(hit)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode

    def rows(self, sql: str) -> list[tuple]:
        path = self.root / "state" / "ledger.db"
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            return connection.execute(sql).fetchall()
        except sqlite3.OperationalError as error:
            # Killed before the first ledger was there: then nobody may have been called.
            assert "no such table" in str(error)
            return []
        finally:
            connection.close()

    def check_intents(self) -> None:
        """I1: every (claim, driver) that was ever called is known to the file, with its pod."""
        known = set(self.rows("SELECT claim_uid, driver FROM claim_drivers"))
        held = {row[0] for row in self.rows("SELECT claim_uid FROM claim_pods")}
        for name, driver in self.drivers.items():
            for uid in driver.prepare_calls:
                assert (uid, name) in known
            for uid in driver.prepared:
                assert uid in held

    def held(self) -> dict[str, set[str]]:
        """What each driver still has prepared."""
        return {name: set(driver.prepared) for name, driver in self.drivers.items()}

    def manager(self, live: set[str]) -> ManagerImpl:
        manager = ManagerImpl(
            FolderClaims(),
            state_dir=self.root / "state",
            plugins_registry=self.root / "plugins_registry",
            settings=SETTINGS,
        )
        manager.start(lambda: PodSnapshot({*live, "another-pod"}, complete=True))
        return manager


@pytest.fixture
def make_node() -> Iterator[Callable[[], Node]]:
    with ExitStack() as stack:
        yield lambda: Node(stack.enter_context(node_root()), stack)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


def nothing_is_owed(node: Node) -> bool:
    return not node.rows("SELECT 1 FROM claims WHERE status != 'UNPREPARED'")


def each_kill(
    make_node: Callable[[], Node], scenario: str, point: str
) -> Iterator[tuple[Node, int]]:
    """A fresh node for each hit of the point, with the agent dead on it, until a run completes."""
    for hit in range(1, HITS_MAX):
        node = make_node()
        if node.run_child(scenario, point, hit) == 0:
            assert hit > 1, f"{point} was never reached"
            return
        node.check_intents()
        yield node, hit
    pytest.fail(f"{point} was hit more than {HITS_MAX} times")


@pytest.mark.parametrize("point", POINTS["life"])
def test_c34_killed_and_the_pod_is_gone(make_node: Callable[[], Node], point: str) -> None:
    """C34, I2: whatever may have been called is unprepared by the next process, all by itself."""
    for node, _ in each_kill(make_node, "life", point):
        called = {name: set(driver.prepare_calls) for name, driver in node.drivers.items()}
        before = {name: driver.unprepare_calls.copy() for name, driver in node.drivers.items()}
        owed = node.rows("SELECT claim_uid, driver FROM claim_drivers WHERE state != 'UNPREPARED'")
        with node.manager(live=set()) as manager:
            wait_until(lambda node=node: nothing_is_owed(node), "reconcile")
            assert not manager.pod_might_need_to_unprepare_resources(POD)
        assert node.held() == {name: set() for name in DRIVERS}
        for name, driver in node.drivers.items():
            for uid in driver.unprepare_calls - before[name]:
                # I4: what was recorded as unprepared before is not asked for again.
                assert (uid, name) in owed
            for uid in called[name]:
                assert driver.unprepare_calls[uid] >= 1


@pytest.mark.parametrize("point", POINTS["prepare"])
def test_c34_killed_and_the_pod_lives(make_node: Callable[[], Node], point: str) -> None:
    """C34, I3, I4: the next process prepares the pod, takes nothing away, and ends it once."""
    for node, _ in each_kill(make_node, "prepare", point):
        with node.manager(live={POD}) as manager:
            info = manager.prepare_resources(POD_OBJECT, "main")
            assert info.cdi_devices == ("gpu.example.com/gpu=gpu-0", "nic.example.com/nic=nic-0")
            assert {name: driver.unprepare_calls for name, driver in node.drivers.items()} == {
                name: {} for name in DRIVERS
            }
            # The pod runs for longer than a call of the dead process may still take effect.
            time.sleep(SETTINGS.late_effect_guard_s)
            manager.unprepare_resources(POD)
            assert nothing_is_owed(node)
        assert node.held() == {name: set() for name in DRIVERS}
        for name, driver in node.drivers.items():
            wanted = {uid for uid, drivers in CLAIMS.values() if name in drivers}
            assert driver.unprepare_calls == dict.fromkeys(wanted, 1)


@pytest.mark.parametrize(
    "point", [point for point in faults.POINTS if point.startswith(("unprepare", "ledger"))]
)
def test_killed_while_letting_go(make_node: Callable[[], Node], point: str) -> None:
    """I4: the caller repeats its unprepare in the next process, and all ends as if nothing was."""
    for node, _ in each_kill(make_node, "life", point):
        with node.manager(live={POD}) as manager:
            manager.unprepare_resources(POD)
            manager.unprepare_resources(POD)
            wait_until(lambda node=node: nothing_is_owed(node), "the last confirmation")
            assert not manager.pod_might_need_to_unprepare_resources(POD)
        assert node.held() == {name: set() for name in DRIVERS}


def test_the_environment_arms_a_point(make_node: Callable[[], Node]) -> None:
    """The command line reads the crash point from its environment, and dies there."""
    node = make_node()
    environment = {**os.environ, faults.ENVIRONMENT_VARIABLE: "ledger.before_commit:1"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "drastate",
            "unprepare",
            "--pod",
            POD,
            "--state-dir",
            node.root / "state",
            "--plugins-registry",
            node.root / "plugins_registry",
        ],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert node.rows("SELECT count(*) FROM ledger") == [(0,)]
