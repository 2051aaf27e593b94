"""Letting go: from the ledger alone, at the right time, exactly as often as needed."""

from __future__ import annotations

import threading
import time

import pytest
from manager_node import (
    C1,
    C2,
    C3,
    FAST,
    GPU,
    GPU_RESULT,
    NIC,
    OTHER_GPU_RESULT,
    P1,
    P2,
    G,
    N,
    Node,
    make_claim,
    make_pod,
    result,
)

from drastate import ManagerImpl, PodSnapshot, Settings, UnprepareError
from drastate.errors import (
    ClaimNotFoundError,
    ClusterForbiddenError,
    ClusterUnavailableError,
    DriverError,
    DriverNotRegisteredError,
    DriverProtocolError,
    DriverRefusedError,
    DriverUnavailableError,
    ManagerClosedError,
)
from drastate.testing.driver import ALWAYS


def wait_until(condition, what: str = "") -> None:
    """Waits for something that another thread does."""
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.01)


def test_unprepare_calls_once(node: Node, manager: ManagerImpl) -> None:
    """I4: the driver is told once, however often the caller repeats it, and in any form."""
    pod = make_pod(P1, "c1")
    manager.prepare_pod_resources(pod)
    for each in (pod, P1, pod, f"metadata: {{uid: {P1}}}\n"):
        manager.unprepare_resources(each)
    assert node.g.unprepare_calls[C1] == 1
    assert (node.states(), node.pods()) == ({("c1", G): "UNPREPARED"}, set())
    assert not manager.pod_might_need_to_unprepare_resources(P1)


def test_i3_the_last_pod_ends_it(node: Node, manager: ManagerImpl) -> None:
    """I3: while another pod holds the claim no driver is told to let go."""
    for uid in (P1, P2):
        manager.prepare_pod_resources(make_pod(uid, "c1"))
    manager.unprepare_resources(P1)
    assert (node.g.unprepare_calls[C1], node.pods()) == (0, {P2})
    assert manager.get_resources(make_pod(P2, "c1"), "main").cdi_devices == (GPU,)
    manager.unprepare_resources(P2)
    assert (node.g.unprepare_calls[C1], node.pods()) == (1, set())


def test_i3_two_pods_that_leave_at_once(node: Node, manager: ManagerImpl) -> None:
    """Two last pods that let go at the same moment lead to one call, never to none."""
    for round_ in range(10):
        for uid in (P1, P2):
            manager.prepare_pod_resources(make_pod(uid, "c1"))
        threads = [
            threading.Thread(target=manager.unprepare_resources, args=[uid]) for uid in (P1, P2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert node.g.unprepare_calls[C1] == round_ + 1
        assert node.states() == {("c1", G): "UNPREPARED"}


def test_c06_partial_failure_leaks_nothing(node: Node, manager: ManagerImpl) -> None:
    """C06: the driver that did prepare is told to let go, and so is the one that may have."""
    node.n.on_prepare.fail_times = ALWAYS
    for _ in range(3):
        with pytest.raises(DriverRefusedError):
            manager.prepare_pod_resources(make_pod(P1, "c3"))
    manager.unprepare_resources(P1)
    assert (node.g.prepare_calls[C3], node.g.unprepare_calls[C3]) == (1, 1)
    assert node.n.unprepare_calls[C3] == 1
    assert node.states() == {("c3", G): "UNPREPARED", ("c3", N): "UNPREPARED"}


def test_c07_the_last_driver_ends_it(node: Node, manager: ManagerImpl) -> None:
    """C07: a claim stays UNPREPARING until its last driver has confirmed; the first is not asked again."""
    manager.prepare_pod_resources(make_pod(P1, "c3"))
    node.n.on_unprepare.fail_times = 1
    with pytest.raises(DriverRefusedError, match=N) as caught:
        manager.unprepare_resources(P1)
    assert (caught.value.driver, caught.value.claim) == (N, "default/c3")
    assert manager.pod_might_need_to_unprepare_resources(P1)
    manager.unprepare_resources(P1)
    assert (node.g.unprepare_calls[C3], node.n.unprepare_calls[C3]) == (1, 2)
    assert not manager.pod_might_need_to_unprepare_resources(P1)
    assert set(node.states().values()) == {"UNPREPARED"}


def test_c09_never_called_nothing_owed(node: Node, manager: ManagerImpl) -> None:
    """C09: a driver that no prepare ever reached is not waited for; the history says why."""
    assert node.g.wait_registered()
    time.sleep(0.3)  # its answer to that has to be back, or it counts as never told
    node.g.die()
    wait_until(lambda: "disconnected" in manager._drivers.explain(G), "disconnected")
    with pytest.raises(DriverUnavailableError, match="disconnected"):
        manager.prepare_pod_resources(make_pod(P1, "c1"))
    assert manager.pod_might_need_to_unprepare_resources(P1)
    manager.unprepare_resources(P1)
    assert node.states() == {("c1", G): "UNPREPARED"}
    assert node.events("unprepared") == [("unprepared", "default/c1", G, None, "was never called")]
    assert node.g.calls == []


def test_c09_perhaps_called_is_owed(node: Node) -> None:
    """C09, C26: after a prepare without an answer the driver is waited for, and the wait is told."""
    quick = Settings(
        call_timeout_s=0.5, registry_poll_s=0.02, late_effect_guard_s=0.2, reconcile_period_s=0.1
    )
    manager = node.manager(settings=quick)
    node.g.on_prepare.hang = True
    with pytest.raises(DriverUnavailableError):
        manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.g.stop()
    wait_until(lambda: not manager._drivers.is_registered(G), "deregistration")
    with pytest.raises(DriverNotRegisteredError, match=f"waiting for driver {G} since 20"):
        manager.unprepare_resources(P1)
    assert node.states() == {("c1", G): "UNPREPARING"}
    assert manager.pod_might_need_to_unprepare_resources(P1)
    node.g.on_prepare.hang = False
    node.g.start()
    wait_until(lambda: node.states() == {("c1", G): "UNPREPARED"}, "the driver's return")
    assert not manager.pod_might_need_to_unprepare_resources(P1)


def test_late_effects_are_confirmed_twice(node: Node) -> None:
    """DESIGN 3: after a prepare without an answer the pod goes at the first confirmation, and the
    claim is UNPREPARED only at a second one, after the guard time.
    """
    settings = Settings(
        call_timeout_s=0.4, registry_poll_s=0.02, late_effect_guard_s=1.0, reconcile_period_s=0.1
    )
    manager = node.manager(settings=settings)
    node.g.on_prepare.hang = True
    with pytest.raises(DriverUnavailableError):
        manager.prepare_pod_resources(make_pod(P1, "c1"))
    manager.unprepare_resources(P1)
    assert not manager.pod_might_need_to_unprepare_resources(P1)
    assert (node.states(), node.pods()) == ({("c1", G): "UNPREPARING"}, set())
    node.g.on_prepare.hang = False  # the lost prepare lands now, after the unprepare
    wait_until(lambda: C1 in node.g.prepared, "the late prepare")
    wait_until(lambda: node.states() == {("c1", G): "UNPREPARED"}, "the second confirmation")
    assert node.g.prepared == {}
    assert node.g.unprepare_calls[C1] == 2


def test_c10_any_pod_object_will_do(node: Node, manager: ManagerImpl) -> None:
    """C10: empty status, no spec, status {} or the bare UID: each finds the claim in the ledger."""
    full = make_pod(P1, "c1")
    full["spec"]["resourceClaims"] = [{"name": "c1", "resourceClaimTemplateName": "t"}]
    full["status"] = {"resourceClaimStatuses": [{"name": "c1", "resourceClaimName": "c1"}]}
    claim = make_claim(
        C1,
        "c1",
        [GPU_RESULT],
        ownerReferences=[
            {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": P1, "controller": True}
        ],
    )
    node.claims.put(claim)
    metadata = full["metadata"]
    forms = [
        {**full, "status": None},
        {**full, "status": {}},
        {"metadata": metadata, "spec": {"containers": []}},
        P1,
    ]
    for count, form in enumerate(forms, 1):
        manager.prepare_pod_resources(full)
        manager.unprepare_resources(form)
        assert node.g.unprepare_calls[C1] == count


@pytest.mark.parametrize(
    "error",
    [ClaimNotFoundError("404"), ClusterForbiddenError("403"), ClusterUnavailableError("timeout")],
)
def test_c12_the_source_is_not_asked(node: Node, manager: ManagerImpl, error) -> None:
    """C12: letting go needs no claim object: it may be gone, forbidden or out of reach."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.claims.error = error
    asked = node.claims.asked
    manager.unprepare_resources(make_pod(P1, "c1"))
    assert (node.claims.asked, node.g.unprepare_calls[C1]) == (asked, 1)


def test_c35_a_new_process_knows(node: Node, manager: ManagerImpl) -> None:
    """C35: after a restart an unprepare works without any prepare."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    manager.close()
    second = node.manager()
    assert second.pod_might_need_to_unprepare_resources(P1)
    second.unprepare_resources(P1)
    assert node.g.unprepare_calls[C1] == 1


def test_c83_lies_in_the_answer(node: Node, manager: ManagerImpl) -> None:
    """C83: an omitted claim is not confirmed, a foreign one ignored, an empty entry a success."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.g.on_unprepare.omit = {C1}
    node.g.on_unprepare.foreign = ["ffffffff-0000-4000-8000-00000000000f"]
    with pytest.raises(DriverProtocolError):
        manager.unprepare_resources(P1)
    assert node.states() == {("c1", G): "UNPREPARING"}
    node.g.on_unprepare.omit = ()
    node.g.on_unprepare.empty = {C1}
    manager.unprepare_resources(P1)
    assert node.states() == {("c1", G): "UNPREPARED"}


def test_one_failing_claim_does_not_stop_the_others(node: Node, manager: ManagerImpl) -> None:
    """I5: of a pod's claims those whose driver confirms end; every failure is listed."""
    uid = "99999999-0000-4000-8000-000000000009"
    node.claims.put(make_claim(uid, "c9", [OTHER_GPU_RESULT]))
    manager.prepare_pod_resources(make_pod(P1, "c1", "c2", "c9"))
    node.g.on_unprepare.fails = {C1}
    node.g.on_unprepare.fail_times = node.n.on_unprepare.fail_times = ALWAYS
    with pytest.raises(UnprepareError) as caught:
        manager.unprepare_resources(P1)
    assert [f.claim for f in caught.value.failures] == ["default/c1", "default/c2"]
    assert caught.value.succeeded == ("default/c9",)
    assert node.states() == {
        ("c1", G): "UNPREPARING",
        ("c2", N): "UNPREPARING",
        ("c9", G): "UNPREPARED",
    }


def test_unprepare_waits_for_the_pods_own_prepare(node: Node, manager: ManagerImpl) -> None:
    """A pod that is deleted while its prepare runs is unprepared after that, not before."""
    node.g.on_prepare.delay_s = 0.4
    preparing = threading.Thread(target=manager.prepare_pod_resources, args=[make_pod(P1, "c1")])
    preparing.start()
    assert node.g.wait_calls()
    manager.unprepare_resources(P1)
    preparing.join(10)
    assert [call.method[4:8] for call in node.g.calls] == ["Prep", "Unpr"]
    assert node.states() == {("c1", G): "UNPREPARED"}
    assert node.g.prepared == {}


def test_the_intent_is_in_the_file_before_the_call(node: Node, manager: ManagerImpl) -> None:
    """When the driver is told to let go, the file already says UNPREPARING."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    seen: list[object] = []
    node.g.on_call = lambda _: seen.append((node.states(), node.pods()))
    manager.unprepare_resources(P1)
    assert seen == [({("c1", G): "UNPREPARING"}, {P1})]


def test_unprepare_of_strangers(manager: ManagerImpl) -> None:
    """Pods that hold nothing are let go at once, again and again."""
    for _ in range(2):
        manager.unprepare_resources("no-such-pod")


# --- reconcile ------------------------------------------------------------------------------------


def test_reconcile_unprepares_what_no_pod_holds(node: Node, manager: ManagerImpl) -> None:
    """I2, C31: a pod that vanished without a word is unprepared, and others are not."""
    for uid, name in ((P1, "c1"), (P2, "c2")):
        manager.prepare_pod_resources(make_pod(uid, name))
    node.live = {P2}
    wait_until(lambda: node.states()["c1", G] == "UNPREPARED", "reconcile")
    assert (node.states()["c2", N], node.pods()) == ("PREPARED", {P2})
    assert node.n.unprepare_calls[C2] == 0


def test_c31_leftovers_in_every_state(node: Node) -> None:
    """C31: claims in each state whose pods and API objects are gone end UNPREPARED; drivers are
    called where a prepare may have happened, and not where none can have.
    """
    pods = [f"bbbbbbbb-0000-4000-8000-{i:012d}" for i in range(4)]
    claims = {
        state: f"cccccccc-0000-4000-8000-{i:012d}"
        for i, state in enumerate(("asked", "never asked", "prepared", "unpreparing"))
    }
    for i, uid in enumerate(claims.values()):
        node.claims.put(make_claim(uid, f"x{i}", [result(G, f"gpu-x{i}", "gpu")], (pods[i],)))
    node.live = set(pods)
    settings = Settings(registry_poll_s=0.02, call_timeout_s=0.5, reconcile_period_s=3600)
    first = node.manager(settings=settings)
    for i in (2, 3):
        first.prepare_pod_resources(make_pod(pods[i], f"x{i}"))
    node.g.on_prepare.fail_times = 1
    with pytest.raises(DriverRefusedError):
        first.prepare_pod_resources(make_pod(pods[0], "x0"))
    node.g.on_unprepare.fail_times = 1
    with pytest.raises(DriverRefusedError):
        first.unprepare_resources(pods[3])
    node.g.die()
    with pytest.raises(DriverUnavailableError):
        first.prepare_pod_resources(make_pod(pods[1], "x1"))
    first.close()
    assert set(node.states().values()) == {"PREPARING", "PREPARED", "UNPREPARING"}
    node.g.calls.clear()
    node.claims.objects.clear()
    node.g.start()
    node.live = None
    second = node.manager()
    wait_until(lambda: node.states()["x3", G] == "UNPREPARED", "what is owed already")
    second.reconcile()
    assert node.states()["x2", G] == "PREPARED"  # nobody can tell who is alive
    node.live = {P1}
    wait_until(lambda: set(node.states().values()) == {"UNPREPARED"}, "reconcile")
    called = {uid for call in node.g.calls for uid in call.uids}
    assert called == {claims["asked"], claims["prepared"], claims["unpreparing"]}
    assert node.claims.asked == 4  # each prepare asked once; reconcile never


@pytest.mark.parametrize("what", ["incomplete", "raises", "not a snapshot", "flapping"])
def test_c113_doubtful_listings_unprepare_nothing(node: Node, what: str) -> None:
    """C113: failed, partial or contradicting listings never show that a pod is gone."""
    asked = 0

    def active_pods() -> object:
        nonlocal asked
        asked += 1
        if what == "incomplete":
            return PodSnapshot(set(), complete=False)
        if what == "raises":
            raise OSError("listing failed")
        if what == "not a snapshot":
            return []
        return PodSnapshot({P1} if asked % 2 else {P2}, complete=True)

    manager = ManagerImpl(
        node.claims, state_dir=node.state, plugins_registry=node.registry, settings=FAST
    )
    with manager:
        manager.start(active_pods)  # type: ignore[arg-type]
        manager.prepare_pod_resources(make_pod(P1, "c1"))
        begun = asked
        wait_until(lambda: asked > begun + 8, "listings")
        assert node.states() == {("c1", G): "PREPARED"}
        assert node.g.unprepare_calls[C1] == 0


def test_a_pod_in_the_middle_of_its_prepare_lives(node: Node, manager: ManagerImpl) -> None:
    """Listings that do not have a pod yet while it is prepared do not make it look gone."""
    node.live = {P2}
    node.n.on_prepare.delay_s = 0.8
    assert manager.prepare_resources(make_pod(P1, "c1", "c2"), "main").cdi_devices == (GPU, NIC)
    assert node.g.unprepare_calls == node.n.unprepare_calls == {}


def test_an_empty_listing_needs_a_third_look(node: Node) -> None:
    """C113: that all pods are gone at once is believed later than that one of them is."""
    manager = ManagerImpl(
        node.claims,
        state_dir=node.state,
        plugins_registry=node.registry,
        settings=Settings(
            reconcile_period_s=3600,
            confirm_gone_s=3600,
            registry_poll_s=0.02,
            snapshot_spacing_s=1e-6,
        ),
    )
    with manager:
        manager.start(lambda: PodSnapshot(set(), complete=True))
        wait_until(lambda: manager._reconciler._next_look > 0, "the first run")
        manager.prepare_pod_resources(make_pod(P1, "c1"))
        for _ in range(2):
            manager.reconcile()
            assert node.states() == {("c1", G): "PREPARED"}
        manager.reconcile()
        assert node.states() == {("c1", G): "UNPREPARED"}


def test_without_active_pods_nobody_is_believed_gone(node: Node) -> None:
    """A manager that was not told who is alive unprepares only what it is asked to."""
    manager = ManagerImpl(
        node.claims, state_dir=node.state, plugins_registry=node.registry, settings=FAST
    )
    with manager:
        manager.start()
        manager.prepare_pod_resources(make_pod(P1, "c1"))
        for _ in range(4):
            manager.reconcile()
        assert node.states() == {("c1", G): "PREPARED"}


def test_reconcile_retries_what_the_caller_gave_up(node: Node, manager: ManagerImpl) -> None:
    """I2: a failed unprepare is asked for again by the loop, with nobody calling."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.g.on_unprepare.fail_times = 2
    with pytest.raises(DriverRefusedError):
        manager.unprepare_resources(P1)
    wait_until(lambda: node.states() == {("c1", G): "UNPREPARED"}, "the loop's retry")
    assert node.g.unprepare_calls[C1] == 3


def test_c33_a_driver_that_returns_is_asked_at_once(node: Node) -> None:
    """C33: pauses between attempts end when the driver registers again."""
    slow = Settings(registry_poll_s=0.02, reconcile_period_s=3600, retry_owed_max_s=3600)
    manager = node.manager(settings=slow)
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.g.on_unprepare.fail_times = ALWAYS
    with pytest.raises(DriverError):
        manager.unprepare_resources(P1)
    for _ in range(3):
        manager.reconcile()
    node.g.on_unprepare.fail_times = 0
    node.g.restart()
    wait_until(lambda: node.states() == {("c1", G): "UNPREPARED"}, "the driver's return")


def test_i5_reconcile_of_one_driver_waits_for_no_other(node: Node, manager: ManagerImpl) -> None:
    """I5: a driver that hangs in unprepare does not hold up what another one owes."""
    for uid, name in ((P1, "c2"), (P2, "c1")):
        manager.prepare_pod_resources(make_pod(uid, name))
    node.n.on_unprepare.hang = True
    node.live = {"aaaaaaaa-0000-4000-8000-000000000003"}
    wait_until(lambda: node.states()["c1", G] == "UNPREPARED", "the driver that works")
    assert node.states()["c2", N] == "UNPREPARING"


# --- life -----------------------------------------------------------------------------------------


def test_a_closed_manager_says_so(node: Node, manager: ManagerImpl) -> None:
    """After close every call is a clear error, close is free, and a new manager goes on."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    manager.close()
    manager.close()
    for call in (manager.unprepare_resources, manager.prepare_pod_resources):
        with pytest.raises(ManagerClosedError, match="closed"):
            call(make_pod(P1, "c1"))
    with pytest.raises(ManagerClosedError):
        manager.start(node.snapshot)
    assert node.manager().pod_might_need_to_unprepare_resources(P1)


def test_a_manager_that_was_not_started_says_so(node: Node) -> None:
    """Before start the ledger is known, and calls say what to do."""
    manager = ManagerImpl(node.claims, state_dir=node.state, plugins_registry=node.registry)
    with manager:
        assert not manager.pod_might_need_to_unprepare_resources(P1)
        with pytest.raises(ManagerClosedError, match=r"start\(\)"):
            manager.prepare_pod_resources(make_pod(P1, "c1"))


def test_c45_unprepare_may_reach_another_instance(node: Node, manager: ManagerImpl) -> None:
    """C45: a claim prepared by the old instance of a driver is unprepared through the new one."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    new = node.add_driver(G, instance="new")
    assert new.wait_registered()
    node.g.die()
    manager.unprepare_resources(P1)
    assert (node.g.unprepare_calls[C1], new.unprepare_calls[C1]) == (0, 1)


def test_c55_another_version_of_the_api(node: Node, manager: ManagerImpl) -> None:
    """C55: a claim prepared under v1beta1 is unprepared after the driver came back with v1."""
    other = node.add_driver(
        "old.example.com", versions=["v1beta1.DRAPlugin"], serves=["v1beta1"], devices=lambda _: []
    )
    assert other.wait_registered()
    node.claims.put(make_claim(C1, "c1", [result("old.example.com", "d", "r")]))
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    other.stop()
    other.versions, other.serves = ["v1.DRAPlugin"], ["v1"]
    other.start()
    assert other.wait_registered()
    manager.unprepare_resources(P1)
    assert [(call.method[4:8], call.api) for call in other.calls] == [
        ("Prep", "v1beta1"),
        ("Unpr", "v1"),
    ]
