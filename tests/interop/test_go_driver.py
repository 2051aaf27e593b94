"""The manager against drivers on the official Go helper: real sockets and real processes."""

from __future__ import annotations

import json
import time

import pytest

from drastate.errors import DriverRefusedError, DriverUnavailableError

pytestmark = pytest.mark.interop

PREPARE = "NodePrepareResources"
UNPREPARE = "NodeUnprepareResources"


def cdi_id(claim_uid, device=None):
    device = device or claim_uid.replace("uid-of-claim-", "gpu-of-")
    return f"gpu.example.com/gpu={claim_uid}-{device}"


def await_calls_to(instance, node, manager):
    """Prepare claims until one goes to ``instance``; returns how many calls there were by then.

    A registered instance is preferred once its connection is up too, a moment later.
    """
    deadline = time.monotonic() + 10
    while not (calls := node.calls(PREPARE)) or calls[-1].instance != instance:
        assert time.monotonic() < deadline, f"no call goes to {instance}, but {calls[-1:]}"
        name = f"probe-{len(calls)}"
        node.add_claim(name, pods=(name,))
        manager.prepare_pod_resources(node.add_pod(name, name))
        time.sleep(0.02)
    return len(node.calls())


def test_prepare_and_unprepare(node, manager):
    """A pod gets the devices whose CDI spec the driver wrote, and one unprepare takes them away."""
    driver = node.start_driver()
    driver.wait_registered()
    claim = node.add_claim("train", pods=("trainer",), devices=("gpu-3", "gpu-5"))
    pod = node.add_pod("trainer", "train")

    info = manager.prepare_resources(pod, "main")

    expected = (cdi_id(claim, "gpu-3"), cdi_id(claim, "gpu-5"))
    assert info.cdi_devices == expected
    assert info.annotations == {f"cdi.k8s.io/gpu.example.com_{claim}": ",".join(expected)}
    spec = json.loads(node.cdi_spec(claim).read_text())
    assert tuple(f"{spec['kind']}={device['name']}" for device in spec["devices"]) == expected
    assert manager.get_resources(pod, "main") == info
    assert manager.pod_might_need_to_unprepare_resources(pod["metadata"]["uid"])
    assert node.calls() == [(PREPARE, claim, "only")]

    manager.unprepare_resources(pod)

    assert not node.cdi_spec(claim).exists()
    assert not manager.pod_might_need_to_unprepare_resources(pod["metadata"]["uid"])
    manager.unprepare_resources(pod)
    assert node.calls(UNPREPARE) == [(UNPREPARE, claim, "only")]


def test_shared_claim(node, manager):
    """Two pods on one claim cost one prepare, and only the last of them to go an unprepare."""
    driver = node.start_driver()
    driver.wait_registered()
    claim = node.add_claim("shared", pods=("first", "second"))
    first, second = node.add_pod("first", "shared"), node.add_pod("second", "shared")

    assert manager.prepare_resources(first, "main") == manager.prepare_resources(second, "main")
    assert node.calls() == [(PREPARE, claim, "only")]

    manager.unprepare_resources(first)
    assert node.calls(UNPREPARE) == []
    assert node.cdi_spec(claim).exists()

    manager.unprepare_resources(second["metadata"]["uid"])
    assert node.calls(UNPREPARE) == [(UNPREPARE, claim, "only")]
    assert not node.cdi_spec(claim).exists()


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_driver_restart(node, manager, how):
    """A restarted driver serves new claims and old ones, with or without sockets left behind."""
    before = node.start_driver("before")
    before.wait_registered()
    old = node.add_claim("old", pods=("old",))
    old_pod = node.add_pod("old", "old")
    manager.prepare_pod_resources(old_pod)

    getattr(before, how)()
    # A crash leaves both sockets behind, a clean stop neither.
    assert any(node.registry.iterdir()) == any(node.plugin_data.iterdir()) == (how == "kill")
    after = node.start_driver("after")
    after.wait_registered()

    new = node.add_claim("new", pods=("new",))
    new_pod = node.add_pod("new", "new")
    assert manager.prepare_resources(new_pod, "main").cdi_devices == (cdi_id(new),)
    manager.unprepare_resources(old_pod)
    assert node.calls() == [
        (PREPARE, old, "before"),
        (PREPARE, new, "after"),
        (UNPREPARE, old, "after"),
    ]
    assert not node.cdi_spec(old).exists()
    assert node.cdi_spec(new).exists()


def test_prepare_while_a_crashed_driver_comes_back(node, manager):
    """C43: a prepare that meets a crashed driver's sockets fails fast, and works once it is back."""
    driver = node.start_driver("before")
    driver.wait_registered()
    before = await_calls_to("before", node, manager)
    driver.kill()
    claim = node.add_claim("train", pods=("trainer",))
    pod = node.add_pod("trainer", "train")

    with pytest.raises(DriverUnavailableError, match="disconnected"):
        manager.prepare_resources(pod, "main")
    assert len(node.calls()) == before
    node.start_driver("after").wait_registered()
    assert manager.prepare_resources(pod, "main").cdi_devices == (cdi_id(claim),)
    assert {call.instance for call in node.calls()[before:]} == {"after"}


def test_rolling_update_uses_the_newer_instance(node, manager):
    """All calls go to the newer instance, for claims of the older too, and after its end."""
    older = node.start_driver("older", pod_uid="5c1e-older")
    older.wait_registered()
    first = node.add_claim("first", pods=("first",))
    first_pod = node.add_pod("first", "first")
    manager.prepare_pod_resources(first_pod)

    newer = node.start_driver("newer", pod_uid="9f02-newer")
    newer.wait_registered()
    before = await_calls_to("newer", node, manager)
    second = node.add_claim("second", pods=("second",))
    second_pod = node.add_pod("second", "second")
    assert manager.prepare_resources(second_pod, "main").cdi_devices == (cdi_id(second),)
    manager.unprepare_resources(first_pod)
    assert node.calls()[0] == (PREPARE, first, "older")
    assert node.calls()[before:] == [(PREPARE, second, "newer"), (UNPREPARE, first, "newer")]
    assert not node.cdi_spec(first).exists()

    older.stop()
    before = len(node.calls())
    third = node.add_claim("third", pods=("third",))
    manager.prepare_pod_resources(node.add_pod("third", "third"))
    manager.unprepare_resources(second_pod)
    assert node.calls()[before:] == [(PREPARE, third, "newer"), (UNPREPARE, second, "newer")]


def test_rolling_update_survives_the_newer_instance(node, manager):
    """When the newer instance crashes, the older takes over without an error, old claims too."""
    older = node.start_driver("older", pod_uid="5c1e-older")
    older.wait_registered()
    newer = node.start_driver("newer", pod_uid="9f02-newer")
    newer.wait_registered()
    await_calls_to("newer", node, manager)
    first = node.add_claim("first", pods=("first",))
    first_pod = node.add_pod("first", "first")
    manager.prepare_pod_resources(first_pod)
    assert node.calls()[-1] == (PREPARE, first, "newer")

    newer.kill()
    before = len(node.calls())
    second = node.add_claim("second", pods=("second",))
    second_pod = node.add_pod("second", "second")
    assert manager.prepare_resources(second_pod, "main").cdi_devices == (cdi_id(second),)
    manager.unprepare_resources(first_pod)
    assert node.calls()[before:] == [(PREPARE, second, "older"), (UNPREPARE, first, "older")]
    assert not node.cdi_spec(first).exists()


def test_manager_restart(node, open_manager):
    """A manager on the same state knows what it owes, and calls once without preparing again."""
    driver = node.start_driver()
    claim = node.add_claim("train", pods=("trainer",))
    pod = node.add_pod("trainer", "train")
    manager = open_manager()
    driver.wait_registered()
    manager.prepare_pod_resources(pod)
    manager.close()

    manager = open_manager()
    driver.wait_registered(times=2)
    assert manager.pod_might_need_to_unprepare_resources(pod["metadata"]["uid"])
    manager.unprepare_resources(pod)
    manager.unprepare_resources(pod)
    assert node.calls() == [(PREPARE, claim, "only"), (UNPREPARE, claim, "only")]
    assert not node.cdi_spec(claim).exists()


def test_claim_that_the_driver_cannot_find(node, manager):
    """When the helper fails the whole call, the error says why, and later calls are served."""
    known_to_driver = node.root / "seen-by-driver"
    lost = node.add_claim("lost", pods=("unlucky",))
    good = node.add_claim("good", pods=("lucky",), folders=(node.manifests, known_to_driver))
    unlucky, lucky = node.add_pod("unlucky", "lost"), node.add_pod("lucky", "good")
    driver = node.start_driver(manifests=known_to_driver)
    driver.wait_registered()

    with pytest.raises(DriverRefusedError, match=r'resourceclaims.*"lost" not found') as refused:
        manager.prepare_resources(unlucky, "main")
    assert refused.value.driver == "gpu.example.com"
    assert refused.value.claim == "lab/lost"
    assert manager.prepare_resources(lucky, "main").cdi_devices == (cdi_id(good),)

    # The driver was asked, so it is told; only then is the pod free to go.
    manager.unprepare_resources(unlucky)
    assert not manager.pod_might_need_to_unprepare_resources(unlucky["metadata"]["uid"])
    assert node.calls(UNPREPARE) == [(UNPREPARE, lost, "only")]
    assert node.cdi_spec(good).exists()


def test_driver_that_fails_once(node, manager):
    """After a driver refused a claim, the same prepare works as soon as the driver does."""
    driver = node.start_driver("only", "-fail-prepare=1")
    driver.wait_registered()
    claim = node.add_claim("train", pods=("trainer",))
    pod = node.add_pod("trainer", "train")

    with pytest.raises(DriverRefusedError, match="failing as -fail-prepare demands"):
        manager.prepare_resources(pod, "main")
    assert not node.cdi_spec(claim).exists()

    assert manager.prepare_resources(pod, "main").cdi_devices == (cdi_id(claim),)
    assert node.calls() == [(PREPARE, claim, "only")] * 2
