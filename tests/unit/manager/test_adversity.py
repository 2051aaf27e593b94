"""What a hostile reviewer found, each with the outcome it must have."""

from __future__ import annotations

import _thread
import dataclasses
import threading
import time
from collections.abc import Callable

import pytest
from manager_node import (
    C1,
    C2,
    FAST,
    GPU,
    GPU_RESULT,
    NIC,
    NIC_RESULT,
    P1,
    P2,
    G,
    Node,
    make_claim,
    make_pod,
    result,
)

from drastate import ManagerImpl, PodSnapshot, faults
from drastate.errors import DrastateError, DriverRefusedError, UIDMismatchError

NEW = "99999999-9999-4999-8999-999999999999"
SHORT = dataclasses.replace(FAST, call_timeout_s=1.5)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.01)


def lack_thread(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The next thread of that name cannot be started, as under a limit of processes."""
    start = threading.Thread.start
    left = [1]

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name.startswith(name) and left:
            left.clear()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)


def test_looks_in_one_instant_are_one_opinion(node: Node) -> None:
    """I3: a listing that is wrong for a moment does not become two that agree by being asked twice."""
    settings = dataclasses.replace(
        FAST, reconcile_period_s=60, confirm_gone_s=5, snapshot_spacing_s=0.15
    )
    manager = node.manager(settings=settings)
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    time.sleep(0.3)
    third = "aaaaaaaa-0000-4000-8000-000000000003"
    node.claims.put(make_claim(NEW, "c1", [GPU_RESULT], (P2, third)))
    node.live = {P2, third}
    threading.Timer(0.1, lambda: setattr(node, "live", {P1, P2, third})).start()
    refused: list[type] = []

    def prepare(uid: str) -> None:
        try:
            manager.prepare_pod_resources(make_pod(uid, "c1"))
        except DrastateError as error:
            refused.append(type(error))

    threads = [threading.Thread(target=prepare, args=[uid]) for uid in (P2, third)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert refused == [UIDMismatchError] * 2
    assert node.g.unprepare_calls[C1] == 0


def test_a_thread_that_cannot_be_had_for_a_call(node: Node, monkeypatch) -> None:
    """Then the drivers of a pod are called one after the other."""
    manager = node.manager(settings=SHORT)
    lack_thread(monkeypatch, "drastate-call")
    info = manager.prepare_resources(make_pod(P1, "c3"), "main")
    assert info.cdi_devices == (GPU, NIC)
    manager.unprepare_resources(P1)
    assert set(node.states().values()) == {"UNPREPARED"}


def test_a_thread_that_cannot_be_had_for_a_duty(node: Node, monkeypatch) -> None:
    """I2: then the driver is asked the next time."""
    manager = node.manager(settings=SHORT)
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.g.on_unprepare.fail_times = 1
    lack_thread(monkeypatch, "drastate-settle")
    with pytest.raises(DriverRefusedError):
        manager.unprepare_resources(P1)
    wait_until(lambda: node.states()["c1", G] == "UNPREPARED", "the loop")


def test_one_claim_under_two_names_of_a_source(node: Node, manager: ManagerImpl) -> None:
    """A source that gives one UID under two names has one claim prepared, and let go."""
    node.claims.put(make_claim(C1, "copy", [GPU_RESULT]))
    manager.prepare_pod_resources(make_pod(P1, "c1", "copy"))
    manager.unprepare_resources(P1)
    assert (node.g.prepare_calls[C1], node.g.unprepare_calls[C1]) == (1, 1)


def test_an_interrupt_during_a_call(node: Node) -> None:
    """I2: Ctrl-C in a driver call leaves nothing in the way of the claim's end."""
    manager = node.manager(settings=SHORT)

    def interrupt(_: object) -> None:
        node.g.on_call = None
        time.sleep(0.1)
        _thread.interrupt_main()
        time.sleep(0.5)

    node.g.on_call = interrupt
    with pytest.raises(KeyboardInterrupt):
        manager.prepare_pod_resources(make_pod(P1, "c1"))
    manager.unprepare_resources(P1)
    assert not manager.pod_might_need_to_unprepare_resources(P1)
    assert node.g.unprepare_calls[C1] >= 1


def test_a_listing_that_hangs_holds_up_nothing(node: Node, manager: ManagerImpl) -> None:
    """I2, I5: duties go on, and a prepare that needs to know who lives fails at its deadline."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    manager.prepare_pod_resources(make_pod(P2, "c2"))
    node.g.on_unprepare.fail_times = 1
    manager.close()
    gate = threading.Event()

    def hang() -> PodSnapshot:
        gate.wait(60)
        return PodSnapshot(set(), complete=False)

    second = ManagerImpl(
        node.claims, state_dir=node.state, plugins_registry=node.registry, settings=SHORT
    )
    with second:
        second.start(hang)
        with pytest.raises(DriverRefusedError):
            second.unprepare_resources(P1)
        wait_until(lambda: node.states()["c1", G] == "UNPREPARED", "the retry")
        node.claims.put(make_claim(NEW, "c2", [NIC_RESULT], (P1,)))
        with pytest.raises(UIDMismatchError):
            second.prepare_pod_resources(make_pod(P1, "c2"))
        gate.set()
    assert node.n.unprepare_calls[C2] == 0


def test_a_prepare_waits_for_a_confirmation_in_flight(node: Node) -> None:
    """I3: the second confirmation of a lost prepare is never sent while a new pod holds the claim."""
    manager = node.manager(settings=dataclasses.replace(SHORT, call_timeout_s=0.5))
    node.g.on_prepare.hang = True
    with pytest.raises(DrastateError):
        manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.g.on_prepare.hang = False
    manager.unprepare_resources(P1)
    begun, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        begun.set()
        go_on.wait(10)

    faults.arm("unprepare.before_call", pause)
    try:
        assert begun.wait(10)
        preparing = threading.Thread(
            target=manager.prepare_pod_resources, args=[make_pod(P2, "c1")]
        )
        preparing.start()
        time.sleep(0.2)
        assert not manager.pod_might_need_to_unprepare_resources(P2)
        go_on.set()
        preparing.join(10)
    finally:
        faults.disarm()
        go_on.set()
    assert node.states() == {("c1", G): "PREPARED"}
    assert C1 in node.g.prepared


def test_an_uncalled_driver_of_an_older_allocation(node: Node, manager: ManagerImpl) -> None:
    """A driver that was never reached, and that the new allocation lacks, blocks nothing."""
    assert node.g.wait_registered()
    time.sleep(0.3)  # its answer to that has to be back, or it counts as never told
    node.g.die()
    wait_until(lambda: "disconnected" in manager._drivers.explain(G), "disconnected")
    with pytest.raises(DrastateError):
        manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.claims.put(make_claim(C1, "c1", [NIC_RESULT]))
    assert manager.prepare_resources(make_pod(P1, "c1"), "main").cdi_devices == (NIC,)


def test_what_is_trusted_is_forgotten(node: Node, manager: ManagerImpl) -> None:
    """I8: nothing stays in memory of claims that have ended, with or without a last call."""
    skip = {"skipNodeOperations": ["NodeUnprepareResources"]}
    for number in range(5):
        uid = f"{number:08d}-1111-4111-8111-111111111111"
        node.claims.put(make_claim(uid, "c1", [result(G, "gpu-0", "gpu", **skip)]))
        manager.prepare_pod_resources(make_pod(P1, "c1", "c2"))
        manager.unprepare_resources(P1)
    assert manager._context.trusted == set()
