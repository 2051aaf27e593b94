"""A limit of calls at a time, for drivers that need one (C15, U22)."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from drastate.clock import SystemClock
from drastate.config import Settings
from drastate.drivers.turns import NoTurnError, Turns
from drastate.errors import DriverUnavailableError, UsageError
from drastate.model import ClaimRef, ClaimUID, DriverName

G = DriverName("gpu.example.com")
N = DriverName("nic.example.com")


def make_claims(count):
    return [ClaimRef(ClaimUID(f"uid-{number}"), "default", f"c{number}") for number in range(count)]


class Meter:
    """How many calls a driver has in hand; for `FakeDriver.devices`."""

    def __init__(self, pause_s=0.03):
        self.now = self.most = 0
        self._pause_s = pause_s
        self._lock = threading.Lock()

    def __call__(self, claim):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self._pause_s)
        with self._lock:
            self.now -= 1
        return []


@pytest.mark.parametrize(
    ("limits", "most"), [({G: 1}, 1), ({G: 3}, 3), ({"*": 2}, 2), ({G: 1, "*": 5}, 1)]
)
def test_no_more_calls_than_the_limit(make_driver, make_client, limits, most):
    """C15, U22: a driver never has more calls in hand than its limit, and all of them are made."""
    driver = make_driver()
    driver.devices = meter = Meter()
    client = make_client(driver_concurrency=limits)
    claims = make_claims(24)
    with ThreadPoolExecutor(24) as pool:
        results = list(pool.map(lambda claim: client.prepare(G, [claim])[claim.uid], claims))
    assert [each.error for each in results] == [None] * 24
    assert meter.most == most


def test_no_limit_by_default(make_driver, make_client):
    """C15: a driver may hold a call until it sees another one, unless it is given a limit."""
    driver = make_driver()
    together = threading.Barrier(4)

    def meet(_):
        together.wait(10)
        return []

    driver.devices = meet
    client = make_client(driver_concurrency={N: 1})
    claims = make_claims(4)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda claim: client.prepare(G, [claim])[claim.uid], claims))
    assert [each.error for each in results] == [None] * 4


def test_batch_is_one_call(make_driver, make_client):
    """A call for several claims takes one turn."""
    driver = make_driver()
    results = make_client(driver_concurrency={G: 1}).prepare(G, make_claims(5))
    assert [each.error for each in results.values()] == [None] * 5
    assert len(driver.calls) == 1


def test_prepare_and_unprepare_share_the_turns(make_driver, make_client, c1, c2):
    """An unprepare waits while a prepare is in hand: the limit is the driver's."""
    driver = make_driver()
    driver.on_prepare.hang = True
    client = make_client(driver_concurrency={G: 1})
    with ThreadPoolExecutor(2) as pool:
        prepare = pool.submit(client.prepare, G, [c1])
        assert driver.wait_calls()
        unprepare = pool.submit(client.unprepare, G, [c2])
        time.sleep(0.3)
        assert driver.unprepare_calls[c2.uid] == 0
        driver.on_prepare.hang = False
        assert prepare.result(10)[c1.uid].error is None
        assert unprepare.result(10)[c2.uid].error is None


def test_first_come_first_served(make_driver, make_client):
    """Calls are made in the order in which they were asked for."""
    driver = make_driver()
    driver.on_prepare.hang = True
    client = make_client(driver_concurrency={G: 1})
    claims = make_claims(12)
    with ThreadPoolExecutor(12) as pool:
        futures = []
        for position, claim in enumerate(claims):
            futures.append(pool.submit(client.prepare, G, [claim]))
            while len(getattr(client._turns._lines.get(G), "waiting", ())) < position:
                time.sleep(0.001)
            assert driver.wait_calls(1)
        driver.on_prepare.hang = False
        for future in futures:
            future.result(10)
    assert [call.uids[0] for call in driver.calls] == [claim.uid for claim in claims]


def test_call_that_never_had_a_turn_was_never_made(make_driver, make_client, c1, c2):
    """A call whose time is over in the line is not late: nothing left, and the text says why."""
    driver = make_driver()
    driver.on_prepare.hang = True
    client = make_client(driver_concurrency={G: 1}, call_timeout_s=1.0)
    assert client.is_registered(G)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.prepare, G, [c1])
        assert driver.wait_calls()
        time.sleep(0.3)
        driver.on_prepare.hang = True
        started = time.monotonic()
        second = client.unprepare(G, [c2])[c2.uid]
        # The first one's deadline frees the turn with some time left; the driver is asked then.
        assert time.monotonic() - started < 3
        first.result(5)
        assert second.error is None
        blocked = [pool.submit(client.prepare, G, [claim]) for claim in (c1, c2)]
        results = [each.result(5) for each in blocked]
    (never,) = [result for each in results for result in each.values() if not result.called]
    assert isinstance(never.error, DriverUnavailableError)
    assert never.error.code is None
    assert never.answered
    assert "no turn within 1 s" in str(never.error)
    assert "1 calls at a time" in str(never.error)


def test_other_drivers_do_not_wait(make_driver, make_client, c1):
    """I5: the line of one driver holds up no call to another, under the same entry for all too."""
    make_driver()
    hanging = make_driver(N)
    hanging.on_prepare.hang = True
    client = make_client(driver_concurrency={"*": 1})
    assert client.is_registered(G)
    with ThreadPoolExecutor(2) as pool:
        stuck = [pool.submit(client.prepare, N, [c1]) for _ in range(2)]
        assert hanging.wait_calls()
        started = time.monotonic()
        assert client.prepare(G, [c1])[c1.uid].error is None
        assert time.monotonic() - started < 2
        client.close()
        for each in stuck:
            each.result(5)


def test_pause_between_attempts_needs_no_turn(make_driver, make_client, c1, c2):
    """While one call rests before its next attempt, another one is made."""
    driver = make_driver()
    driver.on_prepare.fail_times = 1
    driver.on_prepare.code = grpc.StatusCode.UNAVAILABLE
    client = make_client(
        driver_concurrency={G: 1}, call_timeout_s=30.0, retry_initial_s=8.0, retry_max_s=8.0
    )
    assert client.is_registered(G)
    with ThreadPoolExecutor(1) as pool:
        resting = pool.submit(client.prepare, G, [c1])
        assert driver.wait_calls()
        started = time.monotonic()
        assert client.prepare(G, [c2])[c2.uid].error is None
        assert time.monotonic() - started < 3
        assert not resting.done()
        client.close()
        resting.result(5)


def test_close_sends_the_line_home(make_driver, make_client, c1, c2):
    """Calls that wait for their turn end with the client, and were never made."""
    driver = make_driver()
    driver.on_prepare.hang = True
    client = make_client(driver_concurrency={G: 1}, call_timeout_s=60.0)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(client.prepare, G, [c1])
        assert driver.wait_calls()
        waiting = [pool.submit(client.prepare, G, [c2]) for _ in range(5)]
        while len(client._turns._lines[G].waiting) < 5:
            time.sleep(0.01)
        started = time.monotonic()
        client.close()
        results = [each.result(5)[c2.uid] for each in waiting]
        assert time.monotonic() - started < 3
        assert first.result(5)[c1.uid].called
    assert {each.called for each in results} == {False}
    assert all("shutting down" in str(each.error) for each in results)
    assert len(driver.calls) == 1


def test_line_is_forgotten(make_driver, make_client, c1):
    """I8: nothing is kept of a driver that nobody calls."""
    make_driver()
    client = make_client(driver_concurrency={"*": 1})
    assert client.prepare(G, [c1])[c1.uid].error is None
    assert client._turns._lines == {}


def test_turn_is_given_back_whatever_happens():
    """An error in a turn, or in the wait for one, leaves the turn to the next."""
    turns = Turns({"*": 1}, SystemClock())
    with pytest.raises(KeyError), turns.take(G, lambda: 1.0):
        raise KeyError
    with turns.take(G, lambda: 1.0), pytest.raises(NoTurnError), turns.take(G, lambda: 0.01):
        pass
    with turns.take(G, lambda: 1.0):
        pass

    class Interrupted(SystemClock):
        def wait(self, event, timeout_s):
            raise KeyboardInterrupt

    turns._clock = Interrupted()
    with pytest.raises(KeyboardInterrupt), turns.take(G, lambda: 1.0):
        pass
    turns._clock = SystemClock()
    with turns.take(G, lambda: 1.0):
        pass
    assert turns._lines == {}


def test_turn_that_comes_too_late_is_passed_on():
    """A turn that arrives with no time left is not used, and not lost."""
    turns = Turns({"*": 1}, SystemClock())
    left = iter([1.0, 0.0])
    with pytest.raises(NoTurnError), turns.take(G, lambda: next(left)):
        pass
    with turns.take(G, lambda: 1.0):
        pass


@pytest.mark.parametrize("limit", [0, -1, 1.5, "1", None])
def test_limits_that_are_none(limit):
    """A limit that is no whole number above 0 is an error at once, which names the driver."""
    with pytest.raises(UsageError, match=f"driver_concurrency .* {G}"):
        Settings(driver_concurrency={G: limit})


def test_settings_keep_their_own_limits():
    """What a caller does with their mapping later changes no setting; settings can be hashed."""
    limits = {G: 1}
    settings = Settings(driver_concurrency=limits)
    limits[G] = 2
    assert settings.driver_concurrency == {G: 1}
    assert hash(settings) == hash(Settings())
    assert settings != Settings()
