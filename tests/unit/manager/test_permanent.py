"""C21: errors that can never heal."""

from __future__ import annotations

import dataclasses
import time

import pytest
from manager_node import C1, FAST, P1, G, Node, make_pod
from test_adversity import wait_until

from drastate.errors import DriverError, DriverPermanentError, DriverRefusedError
from drastate.testing.behaviour import ALWAYS

OFTEN = dataclasses.replace(FAST, retry_owed_max_s=0.05)


def never(error: DriverError) -> bool:
    return "unknown field" in error.message


def test_c21_a_permanent_error_is_raised_as_one(node: Node) -> None:
    """C21: the hook's word makes it permanent; the driver's own error is the cause."""
    manager = node.manager(permanent_error=never)
    node.g.on_prepare.fail_times = ALWAYS
    node.g.on_prepare.error = "unknown field"
    with pytest.raises(DriverPermanentError, match=r"unknown field.*declared permanent") as caught:
        manager.prepare_pod_resources(make_pod(P1, "c1"))
    assert not caught.value.can_retry
    assert isinstance(caught.value.__cause__, DriverRefusedError)
    assert (caught.value.driver, caught.value.claim_uid) == (G, C1)
    node.g.on_prepare.error = "another"
    with pytest.raises(DriverRefusedError) as caught:
        manager.prepare_pod_resources(make_pod(P1, "c1"))
    assert caught.value.can_retry


def test_c21_what_is_permanent_is_not_asked_for_again(node: Node) -> None:
    """C21, C33: reconcile leaves it alone until the driver registers anew, and then asks at once."""
    manager = node.manager(settings=OFTEN, permanent_error=never)
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.g.on_unprepare.fail_times = ALWAYS
    node.g.on_unprepare.error = "unknown field"
    with pytest.raises(DriverPermanentError):
        manager.unprepare_resources(P1)
    wait_until(lambda: node.g.unprepare_calls[C1] == 2, "reconcile's own attempt")
    time.sleep(0.5)
    assert node.g.unprepare_calls[C1] == 2
    node.g.stop()
    node.g.on_unprepare.fail_times = 0
    node.g.start()
    wait_until(lambda: node.states() == {("c1", G): "UNPREPARED"}, "the driver's return")


def test_c21_without_the_hook_it_is_asked_for_on_and_on(node: Node) -> None:
    """C21: the same error without a hook is retried, at the bounded rate."""
    manager = node.manager(settings=OFTEN)
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.g.on_unprepare.fail_times = ALWAYS
    with pytest.raises(DriverRefusedError):
        manager.unprepare_resources(P1)
    wait_until(lambda: node.g.unprepare_calls[C1] > 4, "more attempts")
    [(first, attempts)] = node.rows("SELECT failing_since, attempts FROM claim_drivers")
    wait_until(lambda: node.g.unprepare_calls[C1] > 6, "more attempts")
    [(later, more)] = node.rows("SELECT failing_since, attempts FROM claim_drivers")
    assert first == later
    assert more > attempts


def test_a_hook_that_fails_declares_nothing(node: Node, caplog) -> None:
    """An exception in the embedder's hook is told, and the error counts as temporary."""

    def broken(_: DriverError) -> bool:
        raise RuntimeError("the hook is broken")

    manager = node.manager(permanent_error=broken)
    node.g.on_prepare.fail_times = ALWAYS
    with pytest.raises(DriverRefusedError):
        manager.prepare_pod_resources(make_pod(P1, "c1"))
    assert "hook for permanent errors failed" in caplog.text
