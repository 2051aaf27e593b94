"""What is in the folder is prepared, what has left it is unprepared, and doubt changes nothing."""

from __future__ import annotations

import logging
import math

from agent_node import CLAIM_UID, UID, G, N, Node, manifest, wait_until

from drastate.testing.driver import ALWAYS


def test_a_pod_comes_and_goes(node: Node) -> None:
    """A pod's file appears with its devices, and goes with it; the driver is told once each."""
    node.put("one", manifest(1))
    node.put("two", manifest(2))
    node.look()
    assert node.devices(1) == node.devices(2) == ["gpu.example.com/gpu=gpu-0"]
    (node.manifests / "one.yaml").unlink()
    node.look()
    assert node.g.unprepare_calls == {}  # one look may come in the middle of a save
    node.look()
    assert (node.devices(1), node.devices(2)) == (None, ["gpu.example.com/gpu=gpu-0"])
    assert node.g.unprepare_calls == {CLAIM_UID.format(1): 1}
    node.look(5)
    assert sum(node.g.prepare_calls.values()) == 2
    assert sum(node.g.unprepare_calls.values()) == 1


def test_the_file_goes_before_the_driver_is_told(node: Node) -> None:
    """The runtime is never told of devices that are being taken down."""
    node.put("one", manifest(1))
    node.look()
    seen: list[object] = []
    node.g.on_call = lambda call: seen.append((call.method, node.devices(1)))
    (node.manifests / "one.yaml").unlink()
    node.look(6)
    assert seen == [("NodeUnprepareResources", None)]


def test_an_empty_folder_is_believed_later(node: Node) -> None:
    """C113: that all pods are gone at once needs more looks than that one is."""
    node.put("one", manifest(1))
    node.look()
    (node.manifests / "one.yaml").unlink()
    node.look(3)
    assert node.g.unprepare_calls == {}
    node.look()
    assert node.g.unprepare_calls == {CLAIM_UID.format(1): 1}


def test_c113_a_broken_file_stops_removals_alone(node: Node, caplog) -> None:
    """C113: while a file is broken no pod is taken for removed; new pods still come."""
    node.put("one", manifest(1))
    node.put("two", manifest(2))
    node.look()
    node.put("two", "kind: [Pod\n")
    (node.manifests / "one.yaml").unlink()
    node.put("three", manifest(3))
    node.look(6)
    assert node.g.unprepare_calls == {}
    assert node.devices(3) is not None
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "two.yaml" in errors[0].error
    node.put("two", manifest(2))
    node.look(3)
    assert node.g.unprepare_calls == {CLAIM_UID.format(1): 1}


def test_a_claim_that_comes_later(node: Node) -> None:
    """A pod whose claim is not there (or not allocated) is prepared when it is."""
    node.put("pod", manifest(1, kinds="pod"))
    node.look(2)
    assert node.devices(1) is None
    node.put("claim", manifest(1, kinds="claim"))
    node.look()
    assert node.devices(1) is not None


def test_c12_the_claim_may_go_first(node: Node) -> None:
    """C12: a pod whose claim's file was removed before is unprepared all the same."""
    node.put("pod", manifest(1, kinds="pod"))
    node.put("claim", manifest(1, kinds="claim"))
    node.put("other", manifest(2))
    node.look()
    (node.manifests / "claim.yaml").unlink()
    node.look()
    (node.manifests / "pod.yaml").unlink()
    node.look(3)
    assert node.g.unprepare_calls == {CLAIM_UID.format(1): 1}


def test_an_edited_pod_is_told_anew(node: Node) -> None:
    """A container that is added to a pod appears in its file."""
    node.put("one", manifest(1))
    node.look()
    text = manifest(1).replace("containers: [", "containers: [{name: side}, ")
    node.put("one", text)
    node.look()
    content = (node.files / f"{UID.format(1)}.json").read_text()
    assert '"side"' in content
    assert sum(node.g.prepare_calls.values()) == 1


def test_a_failing_driver_is_asked_again_when_it_returns(node: Node) -> None:
    """The pause after a failure ends when the driver registers again."""
    node.g.on_prepare.fail_times = ALWAYS
    node.put("one", manifest(1))
    node.look(2)
    assert node.devices(1) is None
    node.g.on_prepare.fail_times = 0
    node.g.restart()

    def prepared() -> bool:
        node.look()
        return node.devices(1) is not None

    wait_until(prepared, "the second attempt")


def test_i5_a_hanging_driver_uses_up_no_turns(node: Node) -> None:
    """I5: however many pods wait for a driver that hangs, pods of others go through."""
    node.n.on_prepare.hang = True
    for n in range(1, 8):
        node.put(f"stuck-{n}", manifest(n, driver=N))
    node.put("fine", manifest(9))
    node.agent.look()
    node.agent.start_due()
    wait_until(lambda: node.devices(9) is not None, "the pod of the driver that works")
    node.n.on_prepare.hang = False
    wait_until(lambda: not node.is_busy(), "the others")


def test_a_pod_that_left_while_the_agent_was_down(node: Node) -> None:
    """A pod with a device file and no manifest is unprepared like one that leaves now."""
    from drastate.agent.loop import ManifestAgent

    node.put("one", manifest(1))
    node.put("two", manifest(2))
    node.look()
    (node.manifests / "one.yaml").unlink()
    old = node.agent
    node.agent = ManifestAgent(
        node.manager, old._folder, old._files, clock=old._clock, scan_interval_s=0.01
    )
    node.look(3)
    assert node.g.unprepare_calls == {CLAIM_UID.format(1): 1}
    assert (node.devices(1), node.devices(2) is not None) == (None, True)


def test_c27_a_pod_that_waits_for_a_device_gets_it_when_its_holder_left(node: Node) -> None:
    """C27: the pause of a refused pod ends when another pod has let go."""
    node.put("one", manifest(1))
    node.look()
    node.put("two", manifest(2).replace("device: d-2", "device: d-1"))
    node.look()
    for work in node.agent._pods.values():
        work.pause_s = 3600.0
        work.due = node.agent._clock.monotonic() + work.pause_s
    assert node.devices(2) is None
    (node.manifests / "one.yaml").unlink()
    view = node.agent._last_view
    node.agent._last_view = node.agent._folder.look()  # the change of the folder ends no pause here
    assert node.agent._last_view is not view
    for _ in range(3):
        node.look()
    assert node.devices(1) is None
    assert node.devices(2) is not None
    assert [call.method[4:8] for call in node.g.calls] == ["Prep", "Unpr", "Prep"]


def test_c21_after_a_permanent_error_the_driver_has_to_return(node: Node) -> None:
    """C21: no pause ends in another attempt; the driver's registration does."""
    node.g.on_prepare.fail_times = ALWAYS
    node.g.on_prepare.error = "unknown field"
    wait_until(lambda: node.registered.count(G) == 1, "the first registration")
    node.put("one", manifest(1))

    def at_rest() -> bool:
        before = node.agent._last_view
        node.look()
        return node.agent._last_view is before

    wait_until(at_rest, "looks that find no change in the folder")
    (work,) = node.agent._pods.values()
    assert work.due == math.inf
    node.g.on_prepare.fail_times = 0
    calls = sum(node.g.prepare_calls.values())
    node.look(2)
    assert node.devices(1) is None
    assert sum(node.g.prepare_calls.values()) == calls
    node.g.restart()

    def prepared() -> bool:
        node.look()
        return node.devices(1) is not None

    wait_until(prepared, "the attempt after the driver's return")
