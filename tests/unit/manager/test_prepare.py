"""Preparing: which drivers are called, what is recorded, what containers get."""

from __future__ import annotations

import threading
import time

import kubernetes.client
import pytest
import yaml
from manager_node import (
    C1,
    C2,
    C3,
    FAST,
    GPU,
    GPU_RESULT,
    NIC,
    NIC_RESULT,
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

from drastate import DriverError, ManagerImpl, PrepareError, Settings
from drastate.errors import (
    AllocationChangedError,
    ClaimNotCreatedError,
    ClaimNotFoundError,
    DriverNotRegisteredError,
    DriverProtocolError,
    DriverRefusedError,
    DriverUnavailableError,
    InvalidPodError,
    LedgerBusyError,
    NotAllocatedError,
    NotOwnedError,
    NotPreparedError,
    NotReservedError,
    UIDMismatchError,
)
from drastate.model import PreparedDevice
from drastate.testing.driver import ALWAYS


def test_devices_and_annotations_of_a_container(manager: ManagerImpl) -> None:
    """A prepared container has its CDI devices, in both forms a runtime may take."""
    info = manager.prepare_resources(make_pod(P1, "c1"), "main")
    assert info.cdi_devices == (GPU,)
    assert info.annotations == {f"cdi.k8s.io/{G}_{C1}": GPU}


def test_prepare_again_calls_nobody(node: Node, manager: ManagerImpl) -> None:
    """I4: repeating a prepare makes no call and changes nothing."""
    for _ in range(3):
        manager.prepare_resources(make_pod(P1, "c1"), "main")
    assert node.g.prepare_calls[C1] == 1
    assert node.states() == {("c1", G): "PREPARED"}


def test_one_batch_per_driver(node: Node, manager: ManagerImpl) -> None:
    """All claims of a pod go to a driver in one call."""
    node.claims.put(make_claim("99999999-0000-4000-8000-000000000009", "c9", [OTHER_GPU_RESULT]))
    manager.prepare_pod_resources(make_pod(P1, "c1", "c9", "c2"))
    assert [len(call.uids) for call in node.g.calls] == [2]
    assert [len(call.uids) for call in node.n.calls] == [1]


def test_drivers_work_in_parallel(node: Node, manager: ManagerImpl) -> None:
    """A pod with claims at two drivers has both called at the same time."""
    together = threading.Barrier(2, timeout=10)
    node.g.on_call = node.n.on_call = lambda _: together.wait()
    manager.prepare_pod_resources(make_pod(P1, "c3"))
    assert node.states() == {("c3", G): "PREPARED", ("c3", N): "PREPARED"}


def test_pod_forms(manager: ManagerImpl) -> None:
    """A V1Pod, a camelCase mapping and YAML text mean the same pod."""
    pod = make_pod(P1, "c1")
    api = kubernetes.client.ApiClient()

    class Response:
        data = yaml.safe_dump(pod)

    from kubernetes.client import V1Container, V1ObjectMeta, V1Pod, V1PodSpec

    typed = V1Pod(
        metadata=V1ObjectMeta(uid=P1, name="pod-1", namespace="default"),
        spec=V1PodSpec(
            resource_claims=[
                kubernetes.client.V1PodResourceClaim(name="c1", resource_claim_name="c1")
            ],
            containers=[
                V1Container(
                    name="main",
                    resources=kubernetes.client.V1ResourceRequirements(
                        claims=[kubernetes.client.CoreV1ResourceClaim(name="c1")]
                    ),
                )
            ],
        ),
    )
    del api
    infos = [manager.prepare_resources(each, "main") for each in (pod, Response.data, typed)]
    assert [info.cdi_devices for info in infos] == [(GPU,)] * 3


def test_c02_last_answer_replaces_the_first(node: Node, manager: ManagerImpl) -> None:
    """C02: after a half-failed prepare the good driver is not asked again, nothing is doubled."""
    node.n.on_prepare.fail_times = 1
    with pytest.raises(DriverRefusedError):
        manager.prepare_resources(make_pod(P1, "c3"), "main")
    assert node.states() == {("c3", G): "PREPARED", ("c3", N): "PREPARING"}
    info = manager.prepare_resources(make_pod(P1, "c3"), "main")
    assert info.cdi_devices == (GPU, NIC)
    assert (node.g.prepare_calls[C3], node.n.prepare_calls[C3]) == (1, 2)
    assert node.rows("SELECT driver, count(*) FROM devices GROUP BY driver") == [(G, 1), (N, 1)]


def test_c02_a_new_answer_wins_wholly(node: Node, manager: ManagerImpl) -> None:
    """C02: a re-prepare after a restart may answer another list; nothing of the first survives."""
    node.g.devices = lambda _: [
        PreparedDevice("node-a", f"old-{i}", None, (), (f"a.b/c=old{i}",)) for i in range(3)
    ]
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    manager.close()
    node.g.devices = lambda _: [PreparedDevice("node-a", "new", None, (), ("a.b/c=new",))]
    second = node.manager()
    assert second.get_resources(make_pod(P1, "c1"), "main").cdi_devices == (
        "a.b/c=old0",
        "a.b/c=old1",
        "a.b/c=old2",
    )
    assert second.prepare_resources(make_pod(P1, "c1"), "main").cdi_devices == ("a.b/c=new",)
    assert node.rows("SELECT device FROM devices") == [("new",)]


def test_failed_reprepare_keeps_the_known_devices(node: Node, manager: ManagerImpl) -> None:
    """DESIGN 3: a failed re-prepare loses neither devices nor the duty to unprepare."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    manager.close()
    node.g.on_prepare.fail_times = ALWAYS
    second = node.manager()
    with pytest.raises(DriverRefusedError):
        second.prepare_pod_resources(make_pod(P1, "c1"))
    assert second.get_resources(make_pod(P1, "c1"), "main").cdi_devices == (GPU,)
    second.unprepare_resources(P1)
    assert node.g.unprepare_calls[C1] == 1


def test_reprepare_boot_trusts_the_ledger(node: Node, manager: ManagerImpl) -> None:
    """With reprepare="boot" a restart in the same boot makes no second call."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    manager.close()
    settings = Settings(reprepare="boot", registry_poll_s=0.02)
    second = node.manager(settings=settings)
    assert second.prepare_resources(make_pod(P1, "c1"), "main").cdi_devices == (GPU,)
    assert node.g.prepare_calls[C1] == 1


@pytest.mark.parametrize("boot_id", ["another-boot", None])
def test_c36_after_a_reboot_nothing_old_is_served(
    node: Node, manager: ManagerImpl, boot_id: str | None
) -> None:
    """C36, C37: in another or unknown boot devices are handed out only after a new prepare."""
    from drastate.clock import SystemClock

    manager.prepare_pod_resources(make_pod(P1, "c1"))
    manager.close()
    clock = SystemClock()
    clock.boot_id = lambda: boot_id  # type: ignore[method-assign]
    second = node.manager(clock=clock, settings=Settings(reprepare="boot", registry_poll_s=0.02))
    with pytest.raises(NotPreparedError, match="reboot"):
        second.get_resources(make_pod(P1, "c1"), "main")
    assert node.pods() == {P1}
    assert second.prepare_resources(make_pod(P1, "c1"), "main").cdi_devices == (GPU,)
    assert node.g.prepare_calls[C1] == 2
    assert second.get_resources(make_pod(P1, "c1"), "main").cdi_devices == (GPU,)


# --- what containers get --------------------------------------------------------------------------


def test_a_container_gets_the_requests_it_names(node: Node, manager: ManagerImpl) -> None:
    """Whole claim, one request, a subrequest: each container gets exactly its devices."""
    devices = [
        PreparedDevice("node-a", "gpu-0", None, ("big",), ("a.b/c=0",)),
        PreparedDevice("node-a", "gpu-1", None, ("alt",), ("a.b/c=1", "a.b/c=common")),
        PreparedDevice("node-a", "gpu-2", None, (), ("a.b/c=common",)),
    ]
    node.g.devices = lambda _: devices
    results = [result(G, "gpu-0", "big"), result(G, "gpu-1", "alt/small")]
    node.claims.put(make_claim(C1, "c1", results))
    uses = {
        "whole": [{"name": "c1"}],
        "big": [{"name": "c1", "request": "big"}],
        "alt": [{"name": "c1", "request": "alt"}],
        "small": [{"name": "c1", "request": "alt/small"}],
        "large": [{"name": "c1", "request": "alt/large"}],
        "twice": [{"name": "c1", "request": "big"}, {"name": "c1"}],
        "none": [],
    }
    pod = make_pod(P1, "c1", containers=uses)
    manager.prepare_pod_resources(pod)
    got = {name: manager.get_resources(pod, name).cdi_devices for name in uses}
    everything = ("a.b/c=0", "a.b/c=1", "a.b/c=common")
    assert got == {
        "whole": everything,
        "big": ("a.b/c=0", "a.b/c=common"),
        "alt": ("a.b/c=1", "a.b/c=common"),
        "small": ("a.b/c=1", "a.b/c=common"),
        "large": ("a.b/c=common",),
        "twice": everything,
        "none": (),
    }


def test_c13_pod_level_claims(node: Node, manager: ManagerImpl) -> None:
    """C13: a claim that no container names is prepared and unprepared, and gives no devices."""
    pod = make_pod(P1, "c2", containers={"main": []})
    assert manager.prepare_resources(pod, "main").cdi_devices == ()
    assert node.n.prepare_calls[C2] == 1
    manager.unprepare_resources(pod)
    assert node.n.unprepare_calls[C2] == 1


def test_c16_share_ids(node: Node, manager: ManagerImpl) -> None:
    """C16: two claims on shares of one device keep apart, and end apart."""
    uids = {
        "s1": "55555555-0000-4000-8000-000000000005",
        "s2": "66666666-0000-4000-8000-000000000006",
    }
    by_uid = {uid: share for share, uid in uids.items()}
    node.g.devices = lambda ref: [
        PreparedDevice("node-a", "gpu-0", by_uid[ref.uid], ("gpu",), (f"{GPU}-{by_uid[ref.uid]}",))
    ]
    for share, uid in uids.items():
        node.claims.put(make_claim(uid, share, [result(G, "gpu-0", "gpu", shareID=share)]))
    assert manager.prepare_resources(make_pod(P1, "s1"), "main").cdi_devices == (f"{GPU}-s1",)
    assert manager.prepare_resources(make_pod(P2, "s2"), "main").cdi_devices == (f"{GPU}-s2",)
    assert set(node.rows("SELECT share_id FROM devices")) == {("s1",), ("s2",)}
    manager.unprepare_resources(P1)
    assert node.states() == {("s1", G): "UNPREPARED", ("s2", G): "PREPARED"}


def extended_pod(request: str) -> dict:
    pod = make_pod(P1, containers={"main": [], "other": []})
    pod["spec"]["containers"][0]["resources"]["requests"] = {"example.com/gpu": "1"}
    pod["status"] = {
        "extendedResourceClaimStatus": {
            "resourceClaimName": "c1",
            "requestMappings": [
                {"containerName": "main", "resourceName": "example.com/gpu", "requestName": request}
            ],
        }
    }
    return pod


def test_c18_extended_resources(node: Node, manager: ManagerImpl) -> None:
    """C18: the scheduler's claim for extended resources serves the container that is mapped."""
    pod = extended_pod("gpu")
    assert manager.prepare_resources(pod, "main").cdi_devices == (GPU,)
    assert manager.get_resources(pod, "other").cdi_devices == ()
    manager.unprepare_resources(P1)
    assert node.g.unprepare_calls[C1] == 1


def test_c18_a_mapping_to_nothing_is_told(manager: ManagerImpl, caplog) -> None:
    """C18: a mapping to a request that the allocation lacks is not an empty list in silence."""
    manager.prepare_pod_resources(extended_pod("container-0-request-7"))
    told = [r for r in caplog.records if getattr(r, "request", "") == "container-0-request-7"]
    assert [(record.container, record.claim) for record in told] == [("main", "default/c1")]


def test_one_claim_under_two_names(node: Node, manager: ManagerImpl) -> None:
    """A pod that names one claim twice can start and end (in the kubelet it can do neither)."""
    pod = make_pod(P1, "c1", containers={"main": [{"name": "c1"}, {"name": "again"}]})
    pod["spec"]["resourceClaims"].append({"name": "again", "resourceClaimName": "c1"})
    assert manager.prepare_resources(pod, "main").cdi_devices == (GPU,)
    manager.unprepare_resources(pod)
    assert (node.g.prepare_calls[C1], node.g.unprepare_calls[C1]) == (1, 1)


def test_a_driver_name_too_long_for_an_annotation(node: Node, manager: ManagerImpl, caplog) -> None:
    """Then there is no annotation and one warning, and the devices are there all the same."""
    long = "a-rather-long-driver-name.example.com"
    driver = node.add_driver(
        long, devices=lambda _: [PreparedDevice("p", "d", None, (), ("a.b/c=d",))]
    )
    assert driver.wait_registered()
    node.claims.put(make_claim(C1, "c1", [result(long, "d", "r")]))
    info = manager.prepare_resources(make_pod(P1, "c1"), "main")
    manager.get_resources(make_pod(P1, "c1"), "main")
    assert (info.cdi_devices, dict(info.annotations)) == (("a.b/c=d",), {})
    assert len([r for r in caplog.records if r.name == "drastate.cdi"]) == 1


def test_an_allocation_without_devices(node: Node, manager: ManagerImpl) -> None:
    """It needs no driver; the claim is tracked, prepared and let go."""
    node.claims.put(make_claim(C1, "c1", []))
    assert manager.prepare_resources(make_pod(P1, "c1"), "main").cdi_devices == ()
    assert manager.pod_might_need_to_unprepare_resources(P1)
    assert node.rows("SELECT status FROM claims") == [("PREPARED",)]
    manager.unprepare_resources(P1)
    assert node.rows("SELECT status FROM claims") == [("UNPREPARED",)]
    assert node.g.calls == []


def test_an_unknown_container(manager: ManagerImpl) -> None:
    """Asking for a container the pod lacks names those it has, and calls nobody."""
    with pytest.raises(InvalidPodError, match="has no container 'side'; it has: main"):
        manager.prepare_resources(make_pod(P1, "c1"), "side")
    assert not manager.pod_might_need_to_unprepare_resources(P1)


def test_get_resources_of_an_unprepared_pod(manager: ManagerImpl) -> None:
    """Devices of a claim that was not prepared for this pod are not given out."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    with pytest.raises(NotPreparedError, match="call prepare_resources first"):
        manager.get_resources(make_pod(P2, "c1"), "main")


# --- refusals: nothing is recorded, nobody is called ----------------------------------------------


def template_pod(uid: str, claim_name: str | None) -> dict:
    pod = make_pod(uid, containers={"main": [{"name": "gpu"}]})
    pod["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "t"}]
    statuses = [{"name": "gpu", "resourceClaimName": claim_name}]
    pod["status"] = {"resourceClaimStatuses": statuses} if claim_name != "" else {}
    return pod


def owned(kind: str, name: str, uid: str, version: str = "v1") -> dict:
    return {
        "ownerReferences": [
            {"apiVersion": version, "kind": kind, "name": name, "uid": uid, "controller": True}
        ]
    }


@pytest.mark.parametrize(
    ("claim", "pod", "error"),
    [
        (None, make_pod(P1, "c1"), ClaimNotFoundError),
        (make_claim(C1, "c1", [GPU_RESULT], ()), make_pod(P1, "c1"), NotReservedError),
        (make_claim(C1, "c1", None), make_pod(P1, "c1"), NotAllocatedError),
        (
            make_claim(C1, "c1", [result("x.example.com", "d", "r")]),
            make_pod(P1, "c1"),
            DriverNotRegisteredError,
        ),
        (make_claim(C1, "c1", [GPU_RESULT]), template_pod(P1, "c1"), NotOwnedError),
        (
            make_claim(C1, "c1", [GPU_RESULT], **owned("Pod", "p", P2)),
            template_pod(P1, "c1"),
            NotOwnedError,
        ),
        (make_claim(C1, "c1", [GPU_RESULT]), template_pod(P1, ""), ClaimNotCreatedError),
    ],
)
def test_c04_c25_a_refused_pod_owes_nothing(node: Node, manager, claim, pod, error) -> None:
    """C04, C09, C24, C25: a refusal names the claim, touches no state, is told once, ends at once."""
    manager.prepare_pod_resources(make_pod(P2, "c2"))
    node.claims.objects.pop("c1")
    if claim:
        node.claims.put(claim)
    for _ in range(3):
        with pytest.raises(error) as caught:
            manager.prepare_pod_resources(pod)
        assert "default/" in str(caught.value)
    assert node.pods() == {P2}
    assert len(node.events("refused")) == 1
    assert not manager.pod_might_need_to_unprepare_resources(P1)
    manager.unprepare_resources(pod)
    assert node.g.calls == []
    assert node.n.unprepare_calls == {}


@pytest.mark.parametrize("why", ["not reserved", "source", "driver", "not allocated"])
def test_c04_a_refused_pod_takes_nothing_from_another(node: Node, manager, why) -> None:
    """C04: unpreparing a pod whose prepare was refused leaves the claim with who holds it."""
    node.claims.put(
        make_claim(C1, "c1", [GPU_RESULT], (P1, *((P2,) if why != "not reserved" else ())))
    )
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    pod = make_pod(P2, "c1")
    if why == "source":
        node.claims.error = ClaimNotFoundError("gone")
    elif why == "driver":
        node.claims.put(make_claim(C2, "c2", [result("x.example.com", "d", "r")]))
        pod = make_pod(P2, "c1", "c2")
    elif why == "not allocated":
        node.claims.put(make_claim(C1, "c1", None))
    with pytest.raises(Exception, match=r"default/|gone"):
        manager.prepare_pod_resources(pod)
    manager.unprepare_resources(pod)
    assert node.g.unprepare_calls[C1] == 0
    assert (node.states(), node.pods()) == ({("c1", G): "PREPARED"}, {P1})


def test_a_null_claim_name_needs_nothing(node: Node, manager: ManagerImpl) -> None:
    """A template entry whose status says "no claim" is fine, for the pod and for its container."""
    assert manager.prepare_resources(template_pod(P1, None), "main").cdi_devices == ()
    assert node.claims.asked == 0


def test_c10_a_prepare_needs_the_status(node: Node, manager: ManagerImpl) -> None:
    """C10: without the status a template claim is not found; the error can be retried."""
    with pytest.raises(ClaimNotCreatedError) as caught:
        manager.prepare_pod_resources(template_pod(P1, ""))
    assert caught.value.can_retry


@pytest.mark.parametrize(
    ("group", "entry", "accepted"),
    [
        ("g1", {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g1"}, True),
        ("g2", {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g1"}, False),
        (None, {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g1"}, False),
        ("g1", {"apiGroup": "example.com", "resource": "widgets", "name": "g1"}, False),
    ],
)
def test_c19_pod_groups(node: Node, manager, group, entry, accepted) -> None:
    """C19: a reservation for the pod's PodGroup counts; any other is refused with its kind named."""
    claim = make_claim(C1, "c1", [GPU_RESULT], tuple(f"other-{i}" for i in range(255)))
    claim["status"]["reservedFor"].insert(0, {**entry, "uid": "7777"})
    node.claims.put(claim)
    pod = make_pod(P1, "c1")
    if group:
        pod["spec"]["schedulingGroup"] = {"podGroupName": group}
    if accepted:
        assert manager.prepare_resources(pod, "main").cdi_devices == (GPU,)
    else:
        with pytest.raises(NotReservedError, match=f"{entry['resource']} g1"):
            manager.prepare_pod_resources(pod)


def test_c19_pod_groups_can_be_switched_off(node: Node) -> None:
    """C19: with the option off only the pod itself counts."""
    manager = node.manager(settings=Settings(pod_groups=False, registry_poll_s=0.02))
    claim = make_claim(C1, "c1", [GPU_RESULT], ())
    claim["status"]["reservedFor"] = [
        {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g1", "uid": "7"}
    ]
    node.claims.put(claim)
    pod = make_pod(P1, "c1")
    pod["spec"]["schedulingGroup"] = {"podGroupName": "g1"}
    with pytest.raises(NotReservedError):
        manager.prepare_pod_resources(pod)


def test_a_template_claim_of_the_pods_group(node: Node, manager: ManagerImpl) -> None:
    """A claim made from a template may be owned by the pod, or by its PodGroup; no group, no crash."""
    node.claims.put(
        make_claim(
            C1,
            "c1",
            [GPU_RESULT],
            (P1,),
            **owned("PodGroup", "g1", "8", "scheduling.k8s.io/v1alpha1"),
        )
    )
    pod = template_pod(P1, "c1")
    with pytest.raises(NotOwnedError, match="PodGroup g1"):
        manager.prepare_pod_resources(pod)
    pod["spec"]["schedulingGroup"] = {"podGroupName": "g1"}
    assert manager.prepare_resources(pod, "main").cdi_devices == (GPU,)


def test_c20_operations_that_need_no_call(node: Node, manager: ManagerImpl) -> None:
    """C20: a driver with no node part is neither needed nor called; the rule is that of prepare time."""
    skip = {"skipNodeOperations": ["*"]}
    node.claims.put(make_claim(C1, "c1", [result("none.example.com", "d", "r", **skip)]))
    assert manager.prepare_resources(make_pod(P1, "c1"), "main").cdi_devices == ()
    node.claims.put(make_claim(C1, "c1", [result("none.example.com", "d", "r")]))
    manager.unprepare_resources(P1)
    assert node.states() == {("c1", "none.example.com"): "UNPREPARED"}


def test_c20_mixed_and_unprepare_only(node: Node, manager: ManagerImpl) -> None:
    """C20: one result that does not skip has the driver called; unprepare alone can be skipped."""
    skip = {"skipNodeOperations": ["NodePrepareResources", "NodeUnprepareResources"]}
    node.claims.put(make_claim(C1, "c1", [result(G, "d", "r", **skip), GPU_RESULT]))
    only_unprepare = {"skipNodeOperations": ["NodeUnprepareResources"]}
    node.claims.put(make_claim(C2, "c2", [result(N, "nic-0", "nic", **only_unprepare)]))
    manager.prepare_pod_resources(make_pod(P1, "c1", "c2"))
    manager.unprepare_resources(P1)
    assert (node.g.prepare_calls[C1], node.g.unprepare_calls[C1]) == (1, 1)
    assert (node.n.prepare_calls[C2], node.n.unprepare_calls[C2]) == (1, 0)


def test_a_call_that_the_next_allocation_skips_is_still_owed(node: Node, manager) -> None:
    """I2: a driver called under an allocation that was replaced by one that skips is unprepared."""
    node.g.on_prepare.fail_times = 1
    with pytest.raises(DriverRefusedError):
        manager.prepare_pod_resources(make_pod(P1, "c1"))
    skip = {"skipNodeOperations": ["*"]}
    node.claims.put(make_claim(C1, "c1", [result(G, "gpu-0", "gpu", **skip)]))
    assert manager.prepare_resources(make_pod(P1, "c1"), "main").cdi_devices == ()
    manager.unprepare_resources(P1)
    assert (node.g.prepare_calls[C1], node.g.unprepare_calls[C1]) == (1, 1)


def test_a_driver_that_the_next_allocation_lacks_is_still_owed(node: Node, manager) -> None:
    """I2: a claim that was allocated anew under the same UID ends at its old driver too."""
    node.g.on_prepare.fail_times = 1
    with pytest.raises(DriverRefusedError):
        manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.claims.put(make_claim(C1, "c1", [NIC_RESULT]))
    with pytest.raises(AllocationChangedError, match=f"{G} prepared for it.*default/pod-1"):
        manager.prepare_resources(make_pod(P1, "c1"), "main")
    manager.unprepare_resources(P1)
    assert (node.g.unprepare_calls[C1], node.n.calls) == (1, [])
    info = manager.prepare_resources(make_pod(P1, "c1"), "main")
    assert info.cdi_devices == (NIC,)
    assert node.states() == {("c1", N): "PREPARED"}


# --- drivers that fail ----------------------------------------------------------------------------


def test_several_failures_are_all_listed(node: Node, manager: ManagerImpl) -> None:
    """A multi-claim failure lists each failure, and what did succeed."""
    uid = "99999999-0000-4000-8000-000000000009"
    node.claims.put(make_claim(uid, "c9", [OTHER_GPU_RESULT]))
    node.g.on_prepare.fails = {C1}
    node.g.on_prepare.fail_times = ALWAYS
    node.n.on_prepare.fail_times = ALWAYS
    with pytest.raises(PrepareError) as caught:
        manager.prepare_pod_resources(make_pod(P1, "c1", "c2", "c9"))
    failures = caught.value.failures
    assert [(type(f), f.driver, f.claim) for f in failures] == [
        (DriverRefusedError, G, "default/c1"),
        (DriverRefusedError, N, "default/c2"),
    ]
    assert caught.value.succeeded == ("default/c9",)
    for part in ("default/c1", "default/c2", G, N, "done all the same: default/c9"):
        assert part in str(caught.value)
    assert node.states()["c9", G] == "PREPARED"


def test_a_driver_that_refuses_the_whole_call(node: Node, manager: ManagerImpl) -> None:
    """I5: when one claim makes a driver fail the whole call, the others are asked for one by one."""
    import grpc

    uid = "99999999-0000-4000-8000-000000000009"
    node.claims.put(make_claim(uid, "c9", [OTHER_GPU_RESULT]))
    node.g.on_prepare.fails = {C1}
    node.g.on_prepare.fail_times = ALWAYS
    node.g.on_prepare.code = grpc.StatusCode.INTERNAL
    with pytest.raises(DriverRefusedError) as caught:
        manager.prepare_pod_resources(make_pod(P1, "c1", "c9"))
    assert caught.value.succeeded == ("default/c9",)
    assert node.states() == {("c1", G): "PREPARING", ("c9", G): "PREPARED"}


def test_c83_lies_cost_only_the_claim_lied_about(node: Node, manager: ManagerImpl, caplog) -> None:
    """C83: an omitted claim fails, a foreign one is ignored, the rest of the answer is durable."""
    uid = "99999999-0000-4000-8000-000000000009"
    node.claims.put(make_claim(uid, "c9", [OTHER_GPU_RESULT]))
    node.g.on_prepare.omit = {C1}
    node.g.on_prepare.foreign = ["ffffffff-0000-4000-8000-00000000000f"]
    with pytest.raises(DriverProtocolError, match="default/c1"):
        manager.prepare_pod_resources(make_pod(P1, "c1", "c9"))
    assert node.states() == {("c1", G): "PREPARING", ("c9", G): "PREPARED"}
    assert node.rows("SELECT count(*) FROM claims") == [(2,)]


def test_c83_a_megabyte_of_error_is_cut(node: Node, manager: ManagerImpl) -> None:
    """C83: an error text of a megabyte does not fill the ledger."""
    node.g.on_prepare.fail_times = ALWAYS
    node.g.on_prepare.error = "x" * 1_000_000
    with pytest.raises(DriverRefusedError):
        manager.prepare_pod_resources(make_pod(P1, "c1"))
    lengths = node.rows(
        "SELECT max(length(last_error)), max(length(detail)) FROM claim_drivers, events"
    )
    assert max(lengths[0]) <= 2048


def test_c21_attempts_are_counted_and_logged_once(node: Node, manager, caplog) -> None:
    """C21, C25: fifty same failures are fifty counted attempts and one warning."""
    node.g.on_prepare.fail_times = ALWAYS
    for _ in range(50):
        with pytest.raises(DriverRefusedError):
            manager.prepare_pod_resources(make_pod(P1, "c1"))
    assert node.rows("SELECT attempts FROM claim_drivers") == [(50,)]
    warned = [r for r in caplog.records if r.levelname == "WARNING" and hasattr(r, "attempt")]
    assert len(warned) == 1
    _, claim, driver, attempt, detail = node.events("prepare_failed")[-1]
    assert (claim, driver, attempt) == ("default/c1", G, 50)
    assert "made to fail" in detail


def test_c84_a_hanging_driver_delays_nobody_else(node: Node) -> None:
    """C84, I5: fifty pods of one driver go through while another driver hangs; close is quick."""
    manager = node.manager(settings=Settings(call_timeout_s=30, registry_poll_s=0.02))
    node.n.on_prepare.hang = True
    pods = [f"bbbbbbbb-0000-4000-8000-{i:012d}" for i in range(50)]
    for i, uid in enumerate(pods):
        claim_uid = f"cccccccc-0000-4000-8000-{i:012d}"
        node.claims.put(make_claim(claim_uid, f"x{i}", [result(G, f"gpu-x{i}", "gpu")], (uid,)))
    errors: list[BaseException] = []

    def stuck() -> None:
        try:
            manager.prepare_pod_resources(make_pod(P1, "c3"))
        except DriverError as error:
            errors.append(error)

    waiting = threading.Thread(target=stuck)
    waiting.start()
    assert node.n.wait_calls()
    threads = [
        threading.Thread(target=manager.prepare_pod_resources, args=[make_pod(uid, f"x{i}")])
        for i, uid in enumerate(pods)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert waiting.is_alive()
    assert sum(state == "PREPARED" for state in node.states().values()) == 51
    started = time.monotonic()
    manager.close()
    assert time.monotonic() - started < 10  # the call's own deadline is 30 s
    waiting.join(10)
    assert [type(error) for error in errors] == [DriverUnavailableError]
    assert node.states()["c3", G] == "PREPARED"
    assert node.states()["c3", N] == "PREPARING"


def test_c15_a_prepare_that_waits_for_another(node: Node, manager: ManagerImpl) -> None:
    """C15: a driver may hold one claim's prepare until it sees another's; calls are not serialised."""
    uid = "99999999-0000-4000-8000-000000000009"
    node.claims.put(make_claim(uid, "c9", [OTHER_GPU_RESULT]))
    both = threading.Barrier(2, timeout=10)
    node.g.devices = lambda _: (both.wait() and []) or []
    threads = [
        threading.Thread(target=manager.prepare_pod_resources, args=[make_pod(pod, name)])
        for pod, name in ((P1, "c1"), (P2, "c9"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert node.states() == {("c1", G): "PREPARED", ("c9", G): "PREPARED"}


def test_two_pods_share_one_call(node: Node, manager: ManagerImpl) -> None:
    """Two pods that prepare a shared claim at once make one call, and both have the devices."""
    node.g.on_prepare.delay_s = 0.3
    got: dict[str, tuple[str, ...]] = {}

    def prepare(uid: str) -> None:
        got[uid] = manager.prepare_resources(make_pod(uid, "c1"), "main").cdi_devices

    threads = [threading.Thread(target=prepare, args=[uid]) for uid in (P1, P2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert got == {P1: (GPU,), P2: (GPU,)}
    assert node.g.prepare_calls[C1] == 1


def test_sharing_a_call_that_fails(node: Node, manager: ManagerImpl) -> None:
    """Who waited for another pod's failed call makes one of its own."""
    node.g.on_prepare.delay_s = 0.3
    node.g.on_prepare.fail_times = 1
    outcomes: dict[str, object] = {}

    def prepare(uid: str) -> None:
        try:
            outcomes[uid] = manager.prepare_resources(make_pod(uid, "c1"), "main").cdi_devices
        except DriverError as error:
            outcomes[uid] = type(error)

    first = threading.Thread(target=prepare, args=[P1])
    first.start()
    assert node.g.wait_calls()
    second = threading.Thread(target=prepare, args=[P2])
    second.start()
    first.join(10)
    second.join(10)
    assert outcomes == {P1: DriverRefusedError, P2: (GPU,)}
    assert node.g.prepare_calls[C1] == 2


# --- the ledger comes first -----------------------------------------------------------------------


def test_i1_the_intent_is_durable_before_the_call(node: Node, manager: ManagerImpl) -> None:
    """I1: when the driver is called, the file already has claim, driver and pod."""
    seen: list[object] = []
    node.g.on_call = lambda _: seen.append((node.states(), node.pods()))
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    assert seen == [({("c1", G): "PREPARING"}, {P1})]


def test_i6_a_ledger_that_cannot_be_written_refuses_first(node: Node, manager) -> None:
    """I6, C99: with the file locked by a foreign process no driver is called, and nothing sticks."""
    import sqlite3

    manager.close()
    quick = Settings(busy_timeout_ms=100, registry_poll_s=0.02)
    second = node.manager(settings=quick)
    foreign = sqlite3.connect(node.state / "ledger.db", isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerBusyError):
        second.prepare_pod_resources(make_pod(P1, "c1"))
    assert node.g.calls == []
    assert not second.pod_might_need_to_unprepare_resources(P1)
    foreign.execute("ROLLBACK")
    foreign.close()
    assert second.prepare_resources(make_pod(P1, "c1"), "main").cdi_devices == (GPU,)


def test_i7_a_second_manager_is_refused(node: Node, manager: ManagerImpl) -> None:
    """I7: one writer; the error names the pid of the first."""
    import os

    with pytest.raises(LedgerBusyError, match=str(os.getpid())) as caught:
        node.manager()
    assert caught.value.pid == os.getpid()


# --- an older claim of the same name --------------------------------------------------------------


def test_c11_a_recreated_claim(node: Node, manager: ManagerImpl) -> None:
    """C11: the old UID is unprepared first when its pod is gone, then the new one is prepared."""
    new = "99999999-9999-4999-8999-999999999999"
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.g.on_unprepare.delay_s = 0.5
    node.live = {P2}
    node.claims.put(make_claim(new, "c1", [GPU_RESULT], (P2,)))
    assert manager.prepare_resources(make_pod(P2, "c1"), "main").cdi_devices == (GPU,)
    order = [(call.method, call.uids[0]) for call in node.g.calls]
    assert order == [
        ("NodePrepareResources", C1),
        ("NodeUnprepareResources", C1),
        ("NodePrepareResources", new),
    ]


def test_c11_a_recreated_claim_whose_pod_lives(node: Node, manager: ManagerImpl) -> None:
    """C11: while the old pod lives the new claim is refused, with both UIDs in the text."""
    new = "99999999-9999-4999-8999-999999999999"
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.claims.put(make_claim(new, "c1", [GPU_RESULT], (P2,)))
    with pytest.raises(UIDMismatchError) as caught:
        manager.prepare_pod_resources(make_pod(P2, "c1"))
    assert C1 in str(caught.value)
    assert new in str(caught.value)
    assert node.g.unprepare_calls[C1] == 0


def test_a_prepare_waits_for_the_unprepare_before(node: Node, manager: ManagerImpl) -> None:
    """A prepare that arrives during the last pod's unprepare gets devices of a new prepare."""
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.g.on_unprepare.delay_s = 0.4
    leaving = threading.Thread(target=manager.unprepare_resources, args=[P1])
    leaving.start()
    assert node.g.wait_calls(2)
    assert manager.prepare_resources(make_pod(P2, "c1"), "main").cdi_devices == (GPU,)
    leaving.join(10)
    assert [call.method[4:8] for call in node.g.calls] == ["Prep", "Unpr", "Prep"]
    assert (node.states(), node.pods()) == ({("c1", G): "PREPARED"}, {P2})
    assert node.rows("SELECT epoch FROM claims") == [(2,)]


def test_settings_reach_the_calls(node: Node) -> None:
    """A call timeout that is not the default shows: a hanging driver fails at it."""
    manager = node.manager(settings=Settings(call_timeout_s=0.5, registry_poll_s=0.02))
    node.g.on_prepare.hang = True
    started = time.monotonic()
    with pytest.raises(DriverUnavailableError):
        manager.prepare_pod_resources(make_pod(P1, "c1"))
    assert 0.4 < time.monotonic() - started < 10
    assert FAST.call_timeout_s != 0.5
    assert node.rows("SELECT called, unanswered FROM claim_drivers") == [(1, 1)]
