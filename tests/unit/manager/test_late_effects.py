"""Calls that got no answer may still take effect: DESIGN section 3, "Late effects"."""

from __future__ import annotations

import dataclasses
import threading
import time
from contextlib import suppress
from datetime import datetime, timedelta

import grpc
import pytest
from manager_node import C1, C3, FAST, GPU, P1, P2, G, N, Node, make_pod
from test_adversity import wait_until

from drastate.clock import SystemClock
from drastate.errors import ClaimBusyError, DrastateError, DriverUnavailableError
from drastate.testing.behaviour import ALWAYS

#: A lost call takes 0.3 s; what it leaves behind is guarded for a second; reconcile looks often.
GUARDED = dataclasses.replace(FAST, call_timeout_s=0.3, late_effect_guard_s=1.0)
#: As GUARDED, with a guard that no test outlasts.
LONG = dataclasses.replace(GUARDED, late_effect_guard_s=600)


def lose_a_prepare(node: Node, manager: object, claim: str = "c1") -> None:
    node.g.on_prepare.hang = True
    with pytest.raises(DriverUnavailableError):
        manager.prepare_pod_resources(make_pod(P1, claim))  # type: ignore[attr-defined]


def lose_an_unprepare(node: Node, manager: object) -> None:
    node.g.on_unprepare.hang = True
    with pytest.raises(DriverUnavailableError):
        manager.unprepare_resources(P1)  # type: ignore[attr-defined]


def test_an_answered_repetition_does_not_settle_the_lost_prepare(node: Node) -> None:
    """I2: the lost prepare lands after the answered one was unprepared, and is taken down too."""
    manager = node.manager(settings=GUARDED)
    lose_a_prepare(node, manager)
    node.g.on_prepare.hang = False
    hung = node.g.prepare_calls[C1]
    wait_until(lambda: C1 in node.g.prepared, "the first prepare ending late")
    node.g.prepared.clear()
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    assert node.g.prepare_calls[C1] > hung
    manager.unprepare_resources(P1)
    assert node.states() == {("c1", G): "UNPREPARING"}
    assert not manager.pod_might_need_to_unprepare_resources(P1)
    node.g.prepared[C1] = ()  # type: ignore[assignment]  # another copy of the lost one lands
    wait_until(lambda: node.states() == {("c1", G): "UNPREPARED"}, "the second confirmation")
    assert node.g.prepared == {}


def test_a_lost_attempt_counts_even_when_the_call_went_well(node: Node) -> None:
    """A call whose first attempt was lost and whose second was answered is confirmed twice too."""
    manager = node.manager(settings=dataclasses.replace(GUARDED, call_timeout_s=5))
    node.g.on_prepare.fail_times = 1
    node.g.on_prepare.code = grpc.StatusCode.UNAVAILABLE
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    manager.unprepare_resources(P1)
    assert node.states() == {("c1", G): "UNPREPARING"}
    wait_until(lambda: node.states() == {("c1", G): "UNPREPARED"}, "the second confirmation")
    assert node.g.unprepare_calls[C1] == 2


def test_long_after_the_loss_one_confirmation_is_enough(node: Node) -> None:
    """When the guard time passed while the pod ran, its unprepare is confirmed once."""
    manager = node.manager(settings=dataclasses.replace(GUARDED, late_effect_guard_s=0.4))
    lose_a_prepare(node, manager)
    node.g.on_prepare.hang = False
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    time.sleep(0.5)
    manager.unprepare_resources(P1)
    assert node.states() == {("c1", G): "UNPREPARED"}
    assert node.g.unprepare_calls[C1] == 1


def test_a_call_of_a_dead_process_may_land_too(node: Node) -> None:
    """C34: what was in flight when the agent died counts from the moment the next one opened."""
    first = node.manager(settings=dataclasses.replace(LONG, call_timeout_s=600))
    node.g.on_prepare.hang = True

    def prepare() -> None:
        with suppress(DrastateError):
            first.prepare_pod_resources(make_pod(P1, "c1"))

    threading.Thread(target=prepare, daemon=True).start()
    assert node.g.wait_calls()
    first._ledger.close()  # what a killed process leaves: the intent
    node.g.on_prepare.hang = False
    second = node.manager(settings=GUARDED)
    second.prepare_pod_resources(make_pod(P1, "c1"))
    second.unprepare_resources(P1)
    assert node.states() == {("c1", G): "UNPREPARING"}
    wait_until(lambda: node.states() == {("c1", G): "UNPREPARED"}, "the second confirmation")


def test_a_prepare_waits_for_a_lost_unprepare(node: Node) -> None:
    """I3: an unprepare that may still land is not answered by giving the devices out again."""
    manager = node.manager(settings=GUARDED)
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    lose_an_unprepare(node, manager)
    prepares = node.g.prepare_calls[C1]
    assert C1 in node.g.prepared
    node.g.on_unprepare.hang = False
    wait_until(lambda: C1 not in node.g.prepared, "an unprepare")
    wait_until(lambda: not manager.pod_might_need_to_unprepare_resources(P1), "confirmation")
    with pytest.raises(
        ClaimBusyError, match=r"may still take effect; try again in \d+ s"
    ) as caught:
        manager.prepare_pod_resources(make_pod(P2, "c1"))
    assert caught.value.can_retry
    assert node.g.prepare_calls[C1] == prepares
    assert not manager.pod_might_need_to_unprepare_resources(P2)
    wait_until(lambda: node.states() == {("c1", G): "UNPREPARED"}, "the second confirmation")
    assert manager.prepare_resources(make_pod(P2, "c1"), "main").cdi_devices == (GPU,)
    assert node.rows("SELECT epoch FROM claims") == [(2,)]


def test_a_lost_unprepare_outlives_the_process(node: Node) -> None:
    """The next process takes the unprepare that the ledger calls under way for lost just now."""
    first = node.manager(settings=LONG)
    first.prepare_pod_resources(make_pod(P1, "c1"))
    lose_an_unprepare(node, first)
    first.close()
    node.g.on_unprepare.hang = False
    second = node.manager(settings=LONG)
    wait_until(lambda: not second.pod_might_need_to_unprepare_resources(P1), "confirmation")
    with pytest.raises(ClaimBusyError, match="may still take effect"):
        second.prepare_pod_resources(make_pod(P2, "c1"))


def test_an_unprepare_that_was_answered_is_not_waited_for(node: Node) -> None:
    """A refusal is an answer: after the next confirmation the claim is free at once."""
    manager = node.manager(settings=dataclasses.replace(LONG, call_timeout_s=5))
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.g.on_unprepare.fail_times = 1
    wait_until(lambda: _lets_go(manager), "confirmation")
    assert node.states() == {("c1", G): "UNPREPARED"}
    assert manager.prepare_resources(make_pod(P2, "c1"), "main").cdi_devices == (GPU,)


def _lets_go(manager: object) -> bool:
    try:
        manager.unprepare_resources(P1)  # type: ignore[attr-defined]
    except DrastateError:
        return False
    return True


def test_a_second_loss_extends_the_guard(node: Node) -> None:
    """While confirmations keep getting lost the claim is never called UNPREPARED."""
    manager = node.manager(settings=dataclasses.replace(GUARDED, late_effect_guard_s=0.5))
    lose_a_prepare(node, manager)
    node.g.on_prepare.hang = False
    manager.unprepare_resources(P1)
    node.g.on_unprepare.fail_times = 2
    node.g.on_unprepare.code = grpc.StatusCode.UNAVAILABLE
    calls = node.g.unprepare_calls[C1]
    wait_until(lambda: node.states() == {("c1", G): "UNPREPARED"}, "the last confirmation")
    # Two lost attempts, the answered one in the guard time of these, and the final one after it.
    assert node.g.unprepare_calls[C1] >= calls + 4


class _Jumping(SystemClock):
    """A wall clock that is set a year ahead, and then two years back."""

    def __init__(self) -> None:
        self.by = timedelta()

    def now(self) -> datetime:
        return super().now() + self.by


@pytest.mark.parametrize("years", [1, -1])
def test_the_guard_does_not_look_at_the_wall_clock(node: Node, years: int) -> None:
    """A wall clock that jumps a year neither ends the guard time nor stretches it."""
    clock = _Jumping()
    manager = node.manager(settings=GUARDED, clock=clock)
    lose_a_prepare(node, manager)
    clock.by = timedelta(days=365 * years)
    node.g.on_prepare.hang = False
    manager.unprepare_resources(P1)
    assert node.states() == {("c1", G): "UNPREPARING"}
    wait_until(lambda: node.states() == {("c1", G): "UNPREPARED"}, "the second confirmation")


def test_only_the_driver_that_was_silent_is_confirmed_twice(node: Node) -> None:
    """Of two drivers of a claim the one that answered is done at its first confirmation."""
    manager = node.manager(settings=LONG)
    lose_a_prepare(node, manager, "c3")
    node.g.on_prepare.hang = False
    manager.unprepare_resources(P1)
    assert node.states() == {("c3", G): "UNPREPARING", ("c3", N): "UNPREPARED"}
    assert (node.g.unprepare_calls[C3], node.n.unprepare_calls[C3]) == (1, 1)
    assert not manager.pod_might_need_to_unprepare_resources(P1)


def test_one_claim_that_is_ending_does_not_hold_up_the_pods_others(node: Node) -> None:
    """I5: a claim whose old driver does not confirm is refused; the pod's others are prepared."""
    manager = node.manager()
    manager.prepare_pod_resources(make_pod(P1, "c1"))
    node.g.on_unprepare.fail_times = ALWAYS
    assert not _lets_go(manager)
    with pytest.raises(ClaimBusyError, match="still being unprepared") as caught:
        manager.prepare_pod_resources(make_pod(P2, "c1", "c2"))
    assert caught.value.succeeded == ("default/c2",)
    assert node.states() == {("c1", G): "UNPREPARING", ("c2", N): "PREPARED"}
    node.g.on_unprepare.fail_times = 0
    manager.prepare_pod_resources(make_pod(P2, "c1", "c2"))
    assert node.states() == {("c1", G): "PREPARED", ("c2", N): "PREPARED"}
