"""C26: a driver that is gone for good, and the operator's exit."""

from __future__ import annotations

import threading

import pytest
from manager_node import C1, C3, P1, P2, G, N, Node, make_pod
from test_adversity import wait_until

from drastate import ManagerImpl
from drastate.errors import (
    ClaimBusyError,
    ClaimHeldError,
    ClaimNotFoundError,
    DrastateError,
    DriverNotRegisteredError,
    UsageError,
)


@pytest.fixture
def stuck(node: Node, manager: ManagerImpl) -> ManagerImpl:
    """A pod that has let go of c3, whose driver G was uninstalled."""
    manager.prepare_pod_resources(make_pod(P1, "c3"))
    node.g.stop()
    wait_until(lambda: not manager._drivers.is_registered(G), "deregistration")
    with pytest.raises(DriverNotRegisteredError):
        manager.unprepare_resources(P1)
    return manager


def test_c26_the_wait_is_explained_and_ends_when_the_driver_is_back(node, stuck) -> None:
    """C26: the error says for whom and since when; the driver's return ends it, nobody's word."""
    with pytest.raises(DriverNotRegisteredError, match=f"waiting for driver {G} since 20"):
        stuck.unprepare_resources(P1)
    node.g.start()
    wait_until(lambda: node.states()["c3", G] == "UNPREPARED", "the driver's return")
    assert node.events("abandoned") == []


def test_c26_abandoning_frees_the_pod(node: Node, stuck: ManagerImpl) -> None:
    """C26: the (claim, driver) is over, the pod goes, and who, why and what are in the history."""
    assert stuck.pod_might_need_to_unprepare_resources(P1)
    stuck.abandon("default/c3", G, reason="uninstalled, OPS-1", by="ada")
    assert not stuck.pod_might_need_to_unprepare_resources(P1)
    assert node.states() == {("c3", G): "UNPREPARED", ("c3", N): "UNPREPARED"}
    [(_, claim, driver, _, detail)] = node.events("abandoned")
    assert (claim, driver) == ("default/c3", G)
    assert detail.startswith("uninstalled, OPS-1 (by ada; it was UNPREPARING since 20")
    calls = len(node.g.calls)
    node.g.start()
    wait_until(lambda: stuck._drivers.is_registered(G), "registration")
    stuck.reconcile()
    assert len(node.g.calls) == calls


def test_abandoning_outlives_the_process(node: Node, stuck: ManagerImpl) -> None:
    """I4: the next manager owes it nothing."""
    stuck.abandon(C3, G, reason="gone")
    stuck.close()
    node.g.start()
    second = node.manager()
    wait_until(lambda: second._drivers.is_registered(G), "registration")
    second.reconcile()
    assert node.g.unprepare_calls[C3] == 0


def test_abandoning_one_driver_leaves_the_others_duty(node: Node, manager: ManagerImpl) -> None:
    """C07: the pod waits on for the driver that was not abandoned."""
    manager.prepare_pod_resources(make_pod(P1, "c3"))
    for driver in (node.g, node.n):
        driver.stop()
    wait_until(lambda: not manager._drivers.is_registered(G), "deregistration")
    wait_until(lambda: not manager._drivers.is_registered(N), "deregistration")
    with pytest.raises(DrastateError):
        manager.unprepare_resources(P1)
    manager.abandon("default/c3", G, reason="gone")
    assert manager.pod_might_need_to_unprepare_resources(P1)
    assert node.states() == {("c3", G): "UNPREPARED", ("c3", N): "UNPREPARING"}


def test_c26_what_a_live_pod_holds_is_not_abandoned(node: Node, manager: ManagerImpl) -> None:
    """C26, I3: refused with the pod's name, also when another pod is letting go."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    manager.prepare_pod_resources(make_pod(P2, "c1"))
    manager.unprepare_resources(P2)
    with pytest.raises(ClaimHeldError, match=f"default/pod-1 \\({P1}\\)"):
        manager.abandon("default/c1", G, reason="gone")
    assert node.states() == {("c1", G): "PREPARED"}
    assert node.events("abandoned") == []


def test_abandoning_nothing(node: Node, stuck: ManagerImpl) -> None:
    """A claim or driver that is not there, or that owes nothing, and no reason: each is named."""
    with pytest.raises(ClaimNotFoundError, match="default/nope"):
        stuck.abandon("default/nope", G, reason="gone")
    with pytest.raises(UsageError, match=f"no driver x.example.com; it has: {G}, {N}"):
        stuck.abandon("default/c3", "x.example.com", reason="gone")
    with pytest.raises(UsageError, match="reason"):
        stuck.abandon("default/c3", G, reason="  ")
    with pytest.raises(ClaimHeldError, match=f"driver {N} owes"):
        stuck.abandon("default/c3", N, reason="gone")
    stuck.abandon("default/c3", G, reason="gone")
    with pytest.raises(ClaimNotFoundError):
        stuck.abandon("default/c3", G, reason="gone")


def test_abandoning_waits_for_a_call(node: Node, manager: ManagerImpl) -> None:
    """A driver that is being called is not given up at that moment: its answer would be lost."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.g.on_unprepare.hang = True
    leaving = threading.Thread(target=manager.unprepare_resources, args=[P1])
    leaving.start()
    assert node.g.wait_calls(2)
    with pytest.raises(ClaimBusyError, match="being called"):
        manager.abandon(C1, G, reason="gone")
    node.g.on_unprepare.hang = False
    leaving.join(10)
    assert node.states() == {("c1", G): "UNPREPARED"}


def test_an_abandoned_claim_can_be_prepared_again(node: Node, stuck: ManagerImpl) -> None:
    """The driver came back after all: a later pod's prepare is a new epoch like any other."""
    stuck.abandon("default/c3", G, reason="gone")
    node.g.start()
    wait_until(lambda: stuck._drivers.is_registered(G), "registration")
    stuck.prepare_pod_resources(make_pod(P2, "c3"))
    assert node.states() == {("c3", G): "PREPARED", ("c3", N): "PREPARED"}
