"""Log lines about drivers are bounded (I8)."""

from __future__ import annotations

import logging
import time

import pytest
import rogue
from rogue import Rogue

from drastate.clock import SystemClock
from drastate.drivers import notices
from drastate.drivers.notices import ALL_BURST, BURST, REFILL_S, Notices
from drastate.model import DriverName

G = DriverName("gpu.example.com")
_log = logging.getLogger("drastate.test")


class SteeredClock(SystemClock):
    def __init__(self):
        self.at = 1000.0

    def monotonic(self):
        return self.at


@pytest.fixture
def clock():
    return SteeredClock()


@pytest.fixture
def log(clock, caplog):
    caplog.set_level(logging.INFO)
    limited = Notices(clock)

    def write(message="it failed", about=G, level=logging.WARNING):
        limited.log(_log, level, message, about=about, extra={"driver": about})

    return write


def test_failing_for_hours(log, clock, caplog):
    """A driver that fails every second for a day has a burst of lines, then one a minute."""
    for _ in range(24 * 3600):
        log()
        clock.at += 1
    per_day = 24 * 3600 / REFILL_S
    assert per_day <= len(caplog.records) <= per_day + BURST
    assert len(caplog.records[0].driver) > 0
    assert not hasattr(caplog.records[0], "left_out")
    assert sum(getattr(each, "left_out", 0) for each in caplog.records) == pytest.approx(
        24 * 3600 - len(caplog.records), abs=REFILL_S
    )


def test_quiet_driver_is_heard_at_once(log, clock, caplog):
    """One driver's lines do not take those of another, nor one kind those of another kind."""
    for _ in range(1000):
        log()
    caplog.clear()
    log(about="nic.example.com")
    log("it is back")
    assert [each.getMessage() for each in caplog.records] == ["it failed", "it is back"]
    assert not hasattr(caplog.records[1], "left_out")


def test_new_name_each_time(log, clock, caplog):
    """A driver that changes its name each time is bounded all the same, and so is what we keep."""
    for number in range(5000):
        log(about=f"n-{number}")
    assert len(caplog.records) == ALL_BURST


def test_memory_is_bounded(clock, caplog):
    """What is remembered of drivers does not grow with their number."""
    limited = Notices(clock)
    for number in range(5000):
        limited.log(_log, logging.WARNING, "it failed", about=f"n-{number}", extra={})
    assert len(limited._buckets) <= notices._REMEMBERED_MAX


def test_line_that_nobody_wants_costs_nothing(log, caplog):
    """A line below the level in force takes no room from those that are written."""
    for _ in range(100):
        log(level=logging.DEBUG)
    log()
    (record,) = caplog.records
    assert not hasattr(record, "left_out")


def test_endpoint_that_comes_and_goes(root, make_driver, make_client, caplog, eventually):
    """A connection that is made and lost again and again costs a few lines, and no busy loop."""
    caplog.set_level(logging.INFO)
    with Rogue(root / "plugins" / "rogue.sock", rogue.goaway_storm) as endpoint:
        bad = make_driver("bad.example.com", announced_endpoint=str(endpoint.path))
        make_client()
        assert bad.wait_registered()
        started = time.monotonic()
        # Tried again and again, even when it is over before anybody has noticed its beginning.
        eventually(lambda: endpoint.accepted > 12, timeout_s=60)
        assert time.monotonic() - started > 3
    words = [each.getMessage() for each in caplog.records]
    assert words.count("connected") <= BURST
    assert words.count("disconnected") <= BURST


@pytest.mark.parametrize("verb", ["prepare", "unprepare"])
def test_liar_that_is_asked_again_and_again(make_driver, make_client, c1, caplog, verb):
    """C83: answers for foreign claims are warned of a few times, not at each retry."""
    driver = make_driver()
    getattr(driver, f"on_{verb}").foreign = [f"f-{number}" for number in range(50)]
    client = make_client()
    for _ in range(50):
        assert getattr(client, verb)(G, [c1])[c1.uid].error is None
    assert len(caplog.records) == BURST
    assert len(caplog.records[0].claim_uid) == 5


def test_refusal_that_changes_its_text(make_driver, make_client, caplog, eventually):
    """A plugin that is refused for another reason each time is bounded too."""
    driver = make_driver(versions=["v0"])
    client = make_client()
    watcher = client._watcher

    def hurry(count):
        with watcher._lock:
            for entry in watcher._entries.values():
                entry.due = 0.0
        return len(driver.notifications) >= count

    for number in range(40):
        driver.versions = [f"v{number}.x"]
        eventually(lambda count=number + 1: hurry(count))
    eventually(lambda: not watcher._running)
    assert len(caplog.records) == BURST
