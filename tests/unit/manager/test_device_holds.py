"""One device is never prepared for two claims at once (C27, k8s #141471)."""

from __future__ import annotations

import dataclasses
import sqlite3
import threading
from typing import Any

import grpc
import pytest
from manager_node import (
    C1,
    FAST,
    GPU,
    GPU_RESULT,
    NIC_RESULT,
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
from drastate.errors import DeviceInUseError, DrastateError, DriverUnavailableError
from drastate.testing.behaviour import ALWAYS

C7 = "77777777-7777-4777-8777-777777777777"
DEVICE = f"{G}/node-a/gpu-0"


def put(node: Node, uid: str, name: str, *results: dict[str, Any]) -> None:
    node.claims.put(make_claim(uid, name, list(results or [GPU_RESULT])))


def order(node: Node) -> list[tuple[str, str]]:
    return [(call.method.removeprefix("Node")[:7], call.uids[0]) for call in node.g.calls]


def test_c27_a_live_holder_refuses_with_both_named(node: Node, manager: ManagerImpl) -> None:
    """C27: both claims, the device and the pod are named; nothing is called or recorded."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    put(node, C7, "c7")
    with pytest.raises(DeviceInUseError) as caught:
        manager.prepare_pod_resources(make_pod(P2, "c7"))
    for part in ("default/c7", C7, "default/c1", C1, DEVICE, P1):
        assert part in str(caught.value)
    assert (caught.value.claim_uid, caught.value.held_uid) == (C7, C1)
    assert caught.value.device == DEVICE
    assert caught.value.can_retry
    assert order(node) == [("Prepare", C1)]
    assert node.states() == {("c1", G): "PREPARED"}
    assert node.pods() == {P1}


def test_c27_a_holder_whose_pod_is_gone_is_unprepared_first(node: Node, manager) -> None:
    """C27: the driver sees the holder's unprepare, then the new claim's prepare."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    put(node, C7, "c7")
    node.live = {P2}
    node.g.on_unprepare.delay_s = 0.3
    assert manager.prepare_resources(make_pod(P2, "c7"), "main").cdi_devices == (GPU,)
    assert order(node) == [("Prepare", C1), ("Unprepa", C1), ("Prepare", C7)]
    assert node.states() == {("c1", G): "UNPREPARED", ("c7", G): "PREPARED"}


def test_c27_a_holder_that_is_being_unprepared_is_waited_for(node: Node, manager) -> None:
    """C27: the pod has let go and the driver is at it; the new claim comes after, not beside."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    put(node, C7, "c7")
    node.g.on_unprepare.delay_s = 0.4
    leaving = threading.Thread(target=manager.unprepare_resources, args=[P1])
    leaving.start()
    assert node.g.wait_calls(2)
    manager.prepare_pod_resources(make_pod(P2, "c7"))
    leaving.join(10)
    assert order(node) == [("Prepare", C1), ("Unprepa", C1), ("Prepare", C7)]


def test_c27_a_holder_whose_driver_refuses_blocks(node: Node, manager: ManagerImpl) -> None:
    """C27: while the holder's unprepare fails the new claim is refused, with the reason."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    put(node, C7, "c7")
    node.live = {P2}
    node.g.on_unprepare.fail_times = ALWAYS
    with pytest.raises(DeviceInUseError, match="made to fail"):
        manager.prepare_pod_resources(make_pod(P2, "c7"))
    assert node.g.prepare_calls[C7] == 0
    node.g.on_unprepare.fail_times = 0
    manager.prepare_pod_resources(make_pod(P2, "c7"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"shareID": "s1"}, {"shareID": "s2"}),
        ({}, {"shareID": "s2"}),
        ({}, {"adminAccess": True}),
        ({"adminAccess": True}, {}),
        ({"adminAccess": True}, {"adminAccess": True}),
    ],
)
def test_c27_shares_and_admin_access_are_allowed(
    node: Node, manager: ManagerImpl, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """C16, C27: another share of the device, or a look at it as an administrator, is no conflict."""
    put(node, C1, "c1", result(G, "gpu-0", "gpu", **first))
    put(node, C7, "c7", result(G, "gpu-0", "gpu", **second))
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    manager.prepare_pod_resources(make_pod(P2, "c7"))
    assert node.states() == {("c1", G): "PREPARED", ("c7", G): "PREPARED"}


def test_one_share_is_not_given_twice(node: Node, manager: ManagerImpl) -> None:
    """The same share ID is the same thing."""
    put(node, C1, "c1", result(G, "gpu-0", "gpu", shareID="s1"))
    put(node, C7, "c7", result(G, "gpu-0", "gpu", shareID="s1"))
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    with pytest.raises(DeviceInUseError, match=f"{DEVICE}/s1"):
        manager.prepare_pod_resources(make_pod(P2, "c7"))


def test_a_pool_or_a_driver_makes_it_another_device(node: Node, manager: ManagerImpl) -> None:
    """A device is named by driver, pool and name together."""
    put(node, C7, "c7", {**GPU_RESULT, "pool": "node-b"}, {**NIC_RESULT, "device": "gpu-0"})
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    manager.prepare_pod_resources(make_pod(P2, "c7"))
    assert node.states()["c7", G] == node.states()["c7", N] == "PREPARED"


def test_two_claims_of_one_pod(node: Node, manager: ManagerImpl) -> None:
    """A pod whose two claims were given one device gets the first; the second is named."""
    put(node, C7, "c7")
    with pytest.raises(DeviceInUseError) as caught:
        manager.prepare_pod_resources(make_pod(P1, "c1", "c7"))
    assert caught.value.succeeded == ("default/c1",)
    assert order(node) == [("Prepare", C1)]


def test_of_many_at_once_one_gets_the_device(node: Node, manager: ManagerImpl) -> None:
    """Sixteen claims on one device, prepared at the same moment: one is, fifteen are refused."""
    pods = [f"bbbbbbbb-0000-4000-8000-{i:012d}" for i in range(16)]
    for i, pod in enumerate(pods):
        uid = f"cccccccc-0000-4000-8000-{i:012d}"
        node.claims.put(make_claim(uid, f"x{i}", [GPU_RESULT], (pod,)))
    node.live = set(pods)
    outcomes: list[str] = []
    together = threading.Barrier(len(pods))

    def prepare(i: int) -> None:
        together.wait()
        try:
            manager.prepare_pod_resources(make_pod(pods[i], f"x{i}"))
        except DrastateError as error:
            outcomes.append(type(error).__name__)
        else:
            outcomes.append("prepared")

    threads = [threading.Thread(target=prepare, args=[i]) for i in range(len(pods))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(outcomes) == ["DeviceInUseError"] * 15 + ["prepared"]
    assert len(node.g.calls) == 1


def test_the_device_is_held_across_a_restart_without_an_answer(node: Node) -> None:
    """A claim that was only asked for holds its device: the allocation is in the ledger."""
    quick = dataclasses.replace(FAST, call_timeout_s=0.3)
    first = node.manager(settings=quick)
    node.g.on_prepare.hang = True
    with pytest.raises(DriverUnavailableError):
        first.prepare_pod_resources(make_pod(P1, "c1"))
    first.close()
    put(node, C7, "c7")
    second = node.manager(settings=quick)
    with pytest.raises(DeviceInUseError, match="default/c1"):
        second.prepare_pod_resources(make_pod(P2, "c7"))
    node.g.on_prepare.hang = False


def test_a_holder_that_may_still_land_keeps_the_device(node: Node) -> None:
    """A confirmed holder with a lost prepare holds the device until the guard time is over."""
    settings = dataclasses.replace(FAST, call_timeout_s=0.3, late_effect_guard_s=0.8)
    manager = node.manager(settings=settings)
    node.g.on_prepare.hang = True
    with pytest.raises(DriverUnavailableError):
        manager.prepare_pod_resources(make_pod(P1, "c1"))
    manager.unprepare_resources(P1)
    node.g.on_prepare.hang = False
    put(node, C7, "c7")
    with pytest.raises(DeviceInUseError, match="not let go of it for certain"):
        manager.prepare_pod_resources(make_pod(P2, "c7"))
    wait_until(lambda: node.states() == {("c1", G): "UNPREPARED"}, "the second confirmation")
    manager.prepare_pod_resources(make_pod(P2, "c7"))
    prepared = [i for i, call in enumerate(order(node)) if call == ("Prepare", C7)]
    unprepared = [i for i, call in enumerate(order(node)) if call == ("Unprepa", C1)]
    assert max(unprepared) < min(prepared)


def test_what_could_not_be_recorded_is_not_held(node: Node, manager: ManagerImpl) -> None:
    """I6: an intent that the ledger refuses leaves the device free for the next claim."""
    manager.close()
    second = node.manager(settings=dataclasses.replace(FAST, busy_timeout_ms=50))
    put(node, C7, "c7")
    foreign = sqlite3.connect(node.state / "ledger.db", isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    with pytest.raises(DrastateError, match="locked"):
        second.prepare_pod_resources(make_pod(P1, "c1"))
    foreign.execute("ROLLBACK")
    foreign.close()
    second.prepare_pod_resources(make_pod(P2, "c7"))
    assert node.states() == {("c7", G): "PREPARED"}


def test_a_skipped_driver_holds_nothing(node: Node, manager: ManagerImpl) -> None:
    """C20: where the node has nothing to do, there is nothing to keep apart."""
    skip = {"skipNodeOperations": ["*"]}
    put(node, C1, "c1", result(G, "gpu-0", "gpu", **skip))
    put(node, C7, "c7", result(G, "gpu-0", "gpu", **skip))
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    manager.prepare_pod_resources(make_pod(P2, "c7"))


def test_a_holder_that_never_was_called_goes_at_once(node: Node, manager: ManagerImpl) -> None:
    """C09, C27: a holder whose driver was never reached is in nobody's way once its pod left."""
    node.g.on_prepare.fail_times = 1
    node.g.on_prepare.code = grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(DrastateError):
        manager.prepare_pod_resources(make_pod(P1, "c1"))
    manager.unprepare_resources(P1)
    put(node, C7, "c7")
    manager.prepare_pod_resources(make_pod(P2, "c7"))


def test_a_ledger_from_before_allocations_were_kept(node: Node) -> None:
    """An upgraded ledger knows from the drivers' answers what its claims hold."""
    first = node.manager()
    first.prepare_pod_resources(make_pod(P1, "c1"))
    first.close()
    database = sqlite3.connect(node.state / "ledger.db", isolation_level=None)
    database.execute("DROP TABLE allocations")
    database.execute("UPDATE alembic_version SET version_num = '0001'")
    database.close()
    second = node.manager()
    put(node, C7, "c7")
    with pytest.raises(DeviceInUseError, match="default/c1"):
        second.prepare_pod_resources(make_pod(P2, "c7"))
    second.prepare_pod_resources(make_pod(P1, "c1"))
    assert node.rows("SELECT device, request FROM allocations") == [("gpu-0", "gpu")]
