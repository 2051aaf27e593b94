"""When a PREPARED claim is prepared again: DESIGN section 3 (C36, C37, C39)."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
from manager_node import (
    C1,
    C2,
    C3,
    FAST,
    GPU,
    NIC,
    P1,
    P2,
    G,
    N,
    Node,
    make_claim,
    make_pod,
    result,
)
from test_adversity import wait_until

from drastate import ManagerImpl
from drastate.clock import SystemClock
from drastate.errors import DriverRefusedError, NotPreparedError
from drastate.model import PreparedDevice
from drastate.testing.behaviour import ALWAYS

BOOT = dataclasses.replace(FAST, reprepare="boot")
ANEW = dataclasses.replace(FAST, reprepare_on_register=True)


class BootClock(SystemClock):
    """A machine in a boot of that name; None: it cannot be told."""

    def __init__(self, boot: str | None) -> None:
        self._boot = boot

    def boot_id(self) -> str | None:
        return self._boot


def restart(node: Node, manager: ManagerImpl, **options: object) -> ManagerImpl:
    manager.close()
    return node.manager(**options)


@pytest.mark.parametrize("settings", [FAST, BOOT], ids=["restart", "boot"])
@pytest.mark.parametrize(
    ("before", "after"), [("b1", "b2"), (None, "b2"), ("b1", None), (None, None)]
)
def test_c36_c37_another_or_an_unknown_boot(node: Node, settings, before, after) -> None:
    """C36, C37: after a reboot, or when it cannot be told, nothing is handed out before a prepare,
    references are kept, and the new answer replaces the old one whole.
    """
    first = node.manager(settings=settings, clock=BootClock(before))
    assert first.prepare_resources(make_pod(P1, "c1"), "main").cdi_devices == (GPU,)
    second = restart(node, first, settings=settings, clock=BootClock(after))
    with pytest.raises(NotPreparedError):
        second.get_resources(make_pod(P1, "c1"), "main")
    assert second.pod_might_need_to_unprepare_resources(P1)
    moved = "gpu.example.com/gpu=moved"
    node.g.devices = lambda _: [PreparedDevice("node-a", "gpu-0", None, ("gpu",), (moved,))]
    assert second.prepare_resources(make_pod(P1, "c1"), "main").cdi_devices == (moved,)
    assert node.g.prepare_calls[C1] == 2
    assert node.rows("SELECT count(*) FROM devices") == [(1,)]
    assert node.rows("SELECT boot_id FROM claim_drivers") == [(after,)]


@pytest.mark.parametrize(("settings", "calls"), [(FAST, 2), (BOOT, 1)], ids=["restart", "boot"])
def test_c36_the_same_boot(node: Node, settings, calls: int) -> None:
    """C36: in the same boot the policy decides whether a restart of the agent asks again; until
    then the devices are good to hand out.
    """
    first = node.manager(settings=settings, clock=BootClock("b1"))
    first.prepare_pod_resources(make_pod(P1, "c1"))
    second = restart(node, first, settings=settings, clock=BootClock("b1"))
    assert second.get_resources(make_pod(P1, "c1"), "main").cdi_devices == (GPU,)
    for _ in range(3):
        assert second.prepare_resources(make_pod(P1, "c1"), "main").cdi_devices == (GPU,)
    assert node.g.prepare_calls[C1] == calls


def test_c37_a_boot_id_file_that_cannot_be_read(node: Node, tmp_path, monkeypatch) -> None:
    """C37: an unreadable or empty boot_id file is an unknown boot, and never a failure to start."""
    from drastate import clock

    for content in (None, b"", b"\xff\xfe"):
        path = tmp_path / "boot_id"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        monkeypatch.setattr(clock, "_BOOT_ID", path)
        manager = node.manager()
        assert SystemClock().boot_id() is None
        manager.prepare_pod_resources(make_pod(P1, "c1"))
        manager.close()
    assert node.g.prepare_calls[C1] == 3


def test_c36_a_failed_prepare_after_a_reboot_loses_nothing(node: Node) -> None:
    """C36: the devices stay unserved and known, the duty to unprepare stays."""
    first = node.manager(clock=BootClock("b1"))
    first.prepare_pod_resources(make_pod(P1, "c1"))
    second = restart(node, first, clock=BootClock("b2"))
    node.g.on_prepare.fail_times = ALWAYS
    with pytest.raises(DriverRefusedError):
        second.prepare_pod_resources(make_pod(P1, "c1"))
    with pytest.raises(NotPreparedError):
        second.get_resources(make_pod(P1, "c1"), "main")
    assert node.rows("SELECT device FROM devices") == [("gpu-0",)]
    second.unprepare_resources(P1)
    assert node.g.unprepare_calls[C1] == 1


def test_c39_by_default_a_restarted_driver_is_not_called(node: Node, manager: ManagerImpl) -> None:
    """C39: as with the kubelet, a driver that registers anew gets no prepare by itself."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.g.die()
    node.g.prepared.clear()
    node.g.start()
    wait_until(lambda: len(node.g.notifications) >= 2, "registration")
    manager.reconcile()
    time.sleep(0.3)
    assert node.g.prepare_calls[C1] == 1


def test_c39_a_driver_that_forgot_is_told_again(node: Node) -> None:
    """C39: with the policy each live (claim, driver) is prepared once more, and what is not live, or
    another driver's, is not; request names and devices stay whole.
    """
    node.claims.put(
        make_claim("44444444-4444-4444-8444-444444444444", "c4", [result(G, "gpu-4", "gpu")])
    )
    manager = node.manager(settings=ANEW)
    manager.prepare_pod_resources(make_pod(P1, "c3"))
    manager.prepare_pod_resources(make_pod(P2, "c4"))
    manager.unprepare_resources(P2)
    time.sleep(1.5)  # the run of the first registration, which had nothing to do, is over
    node.g.die()
    node.g.prepared.clear()
    before = node.g.prepare_calls[C3]
    node.g.start()
    wait_until(lambda: C3 in node.g.prepared, "the prepare")
    wait_until(
        lambda: node.rows("SELECT count(*) FROM claim_drivers WHERE unanswered") == [(0,)],
        "its record",
    )
    assert node.g.prepare_calls[C3] == before + 1
    assert set(node.g.prepared) == {C3}
    assert node.n.prepare_calls[C3] == 1
    assert manager.get_resources(make_pod(P1, "c3"), "main").cdi_devices == (GPU, NIC)
    assert node.states()["c3", G] == "PREPARED"


def test_c39_a_driver_that_registers_in_a_loop(node: Node) -> None:
    """C39, I8: twenty registrations in a row are a few calls and one thread, not twenty."""
    manager = node.manager(settings=ANEW)
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    for _ in range(20):
        node.g.die()
        node.g.start()
        time.sleep(0.05)
    wait_until(lambda: manager._drivers.is_registered(G), "registration")
    names = [thread.name for thread in threading.enumerate()]
    assert sum(name == f"drastate-anew-{G}" for name in names) <= 1
    assert node.g.prepare_calls[C1] <= 8


def test_c39_a_failing_repetition_is_tried_again(node: Node) -> None:
    """C39: what the driver refuses at first is asked for again; the devices are kept meanwhile."""
    manager = node.manager(settings=ANEW)
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    time.sleep(1.5)
    node.g.die()
    node.g.prepared.clear()
    node.g.on_prepare.fail_times = 2
    node.g.start()
    wait_until(lambda: node.rows("SELECT attempts FROM claim_drivers") != [(0,)], "a failure")
    assert manager.get_resources(make_pod(P1, "c1"), "main").cdi_devices == (GPU,)
    wait_until(lambda: C1 in node.g.prepared, "the prepare")


def test_c39_a_pod_that_leaves_meanwhile_is_unprepared_after(node: Node) -> None:
    """I2, I3: an unprepare waits for the repeated prepare and has the last word."""
    manager = node.manager(settings=ANEW)
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    time.sleep(1.5)
    node.g.die()
    node.g.on_prepare.delay_s = 0.5
    calls = len(node.g.calls)
    node.g.start()
    wait_until(lambda: len(node.g.calls) > calls, "the prepare")
    manager.unprepare_resources(P1)
    assert [call.method[4:8] for call in node.g.calls[calls:]] == ["Prep", "Unpr"]
    assert node.states() == {("c1", G): "UNPREPARED"}
    assert node.g.prepared == {}


def test_close_ends_the_pauses(node: Node) -> None:
    """A manager that closes leaves no thread that prepares anew."""
    manager = node.manager(settings=ANEW)
    manager.prepare_pod_resources(make_pod(P1, "c2"))
    node.n.on_prepare.fail_times = ALWAYS
    node.n.die()
    node.n.start()
    wait_until(lambda: node.n.prepare_calls[C2] > 1, "a failing run")
    manager.close()
    wait_until(
        lambda: not any(t.name == f"drastate-anew-{N}" for t in threading.enumerate()), "its end"
    )
