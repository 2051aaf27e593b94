"""Calls that go well, go wrong, and are repeated; on real sockets."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from drastate.drivers import channel
from drastate.errors import (
    DriverNotRegisteredError,
    DriverProtocolError,
    DriverRefusedError,
    DriverUnavailableError,
)
from drastate.model import ClaimRef, ClaimUID, DriverName, PreparedDevice
from drastate.testing.driver import ALWAYS

G = DriverName("gpu.example.com")
N = DriverName("nic.example.com")


@pytest.fixture
def driver(make_driver):
    return make_driver()


def await_connection(client, eventually, driver=G):
    eventually(lambda: any(i.connected for i in client.plugins() if i.driver == driver))


def test_prepare_and_unprepare(driver, make_client, c1, c2):
    """One call prepares several claims, one unprepares them."""
    client = make_client()
    results = client.prepare(G, [c1, c2])
    assert list(results) == [c1.uid, c2.uid]
    for result in results.values():
        assert result.error is None
        assert result.devices == (
            PreparedDevice("node-a", "gpu-0", cdi_device_ids=("gpu.example.com/gpu=gpu-0",)),
        )
        assert (result.called, result.answered) == (True, True)
    assert set(driver.prepared) == {c1.uid, c2.uid}
    results = client.unprepare(G, [c1, c2])
    assert [result.error for result in results.values()] == [None, None]
    assert driver.prepared == {}
    assert [(call.method, call.claims) for call in driver.calls] == [
        ("NodePrepareResources", (c1, c2)),
        ("NodeUnprepareResources", (c1, c2)),
    ]


def test_claim_named_twice_is_asked_for_once(driver, make_client, c1):
    """Answers are keyed by UID, so a duplicate in the request would never be answered."""
    client = make_client()
    assert client.prepare(G, []) == {}
    assert list(client.prepare(G, [c1, c1])) == [c1.uid]
    assert driver.calls[0].uids == (c1.uid,)


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_share_id_in_both_versions(make_driver, make_client, c1, version):
    """C55: the share ID arrives in v1 and is unknown in v1beta1."""
    shared = PreparedDevice("node-a", "gpu-0", "s1", ("gpu",), ("gpu.example.com/gpu=gpu-0-s1",))
    driver = make_driver(versions=[f"{version}.DRAPlugin"], devices={c1.uid: [shared]})
    client = make_client()
    (device,) = client.prepare(G, [c1])[c1.uid].devices
    assert device.share_id == ("s1" if version == "v1" else None)
    assert device.cdi_device_ids == ("gpu.example.com/gpu=gpu-0-s1",)
    assert driver.calls[0].api == version


def test_driver_that_is_not_registered(make_client, c1):
    """Without a plugin nothing leaves the process, and the text says what to do."""
    client = make_client()
    for call in (client.prepare, client.unprepare):
        result = call(N, [c1])[c1.uid]
        assert isinstance(result.error, DriverNotRegisteredError)
        assert (result.called, result.answered) == (False, True)
        assert (result.error.driver, result.error.claim_uid) == (N, c1.uid)
        assert "not registered" in str(result.error)
        assert "default/c1" in str(result.error)


def test_claim_error_is_not_retried(driver, make_client, c1, c2):
    """An error that the driver answers for one claim is that claim's alone, and is final."""
    driver.on_prepare.fail_times = 1
    driver.on_prepare.fails = {c1.uid}
    driver.on_prepare.error = "no such device"
    results = make_client().prepare(G, [c1, c2])
    assert isinstance(results[c1.uid].error, DriverRefusedError)
    assert results[c1.uid].error.code is None
    assert "no such device" in str(results[c1.uid].error)
    assert (results[c1.uid].called, results[c1.uid].answered) == (True, True)
    assert results[c2.uid].error is None
    assert len(driver.calls) == 1


@pytest.mark.parametrize(
    "code", ["UNIMPLEMENTED", "UNKNOWN", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "INTERNAL"]
)
def test_other_statuses_are_not_retried(driver, make_client, c1, code):
    """A status that a retry cannot mend is returned at once, with its code and cause."""
    driver.on_prepare.fail_times = ALWAYS
    driver.on_prepare.code = grpc.StatusCode[code]
    driver.on_prepare.error = "such is life"
    result = make_client().prepare(G, [c1])[c1.uid]
    assert isinstance(result.error, DriverRefusedError)
    assert result.error.code == code
    assert "such is life" in str(result.error)
    assert isinstance(result.error.__cause__, grpc.RpcError)
    assert result.called
    # The gRPC library reports a reset stream as INTERNAL, so that one proves nothing.
    assert result.answered is (code != "INTERNAL")
    assert len(driver.calls) == 1


def test_service_that_is_announced_but_not_served(make_driver, make_client, c1):
    """A driver that announces v1 and serves v1beta1 only refuses every call."""
    make_driver(serves=["v1beta1"])
    result = make_client().prepare(G, [c1])[c1.uid]
    assert isinstance(result.error, DriverRefusedError)
    assert result.error.code == "UNIMPLEMENTED"


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"])
def test_transient_statuses_are_retried(driver, make_client, c1, code):
    """C59: the transport's ways to fail are alike, and a retry mends them; what was lost is told."""
    driver.on_prepare.fail_times = 2
    driver.on_prepare.code = grpc.StatusCode[code]
    result = make_client(retry_initial_s=0.02).prepare(G, [c1])[c1.uid]
    assert (result.error, result.called, result.answered) == (None, True, False)
    assert driver.prepare_calls[c1.uid] == 3


def test_lost_call_stays_lost_whatever_the_retry_says(driver, make_client, c1):
    """A call that got no answer may still land, whatever a later one answers."""
    driver.on_prepare.fail_times = 1
    driver.on_prepare.code = grpc.StatusCode.UNAVAILABLE
    driver.devices = lambda _: []
    client = make_client(retry_initial_s=0.02)
    assert not client.prepare(G, [c1])[c1.uid].answered
    assert client.prepare(G, [c1])[c1.uid].answered
    driver.on_prepare.fail_times = 1

    def refuse(_):
        raise LookupError("gone")

    driver.devices = refuse
    result = client.prepare(G, [c1])[c1.uid]
    assert isinstance(result.error, DriverRefusedError)
    assert (result.called, result.answered) == (True, False)


def test_budget_is_kept(driver, make_client, c1):
    """C68, C69: retries end within the budget, and the cause is the last gRPC error."""
    driver.on_prepare.fail_times = ALWAYS
    driver.on_prepare.code = grpc.StatusCode.UNAVAILABLE
    client = make_client(call_timeout_s=1.5, retry_initial_s=0.1, retry_max_s=60.0)
    assert client.is_registered(G)
    started = time.monotonic()
    result = client.prepare(G, [c1])[c1.uid]
    assert 0.9 < time.monotonic() - started < 2.0
    assert isinstance(result.error, DriverUnavailableError)
    assert result.error.code == "UNAVAILABLE"
    assert result.error.__cause__.code() is grpc.StatusCode.UNAVAILABLE
    assert result.error.endpoint == str(driver.endpoint_path)
    assert (result.called, result.answered) == (True, False)
    assert 3 <= len(driver.calls) <= 8


def test_pauses_are_capped(driver, make_client, c1):
    """The pause between retries stops growing."""
    driver.on_prepare.fail_times = ALWAYS
    driver.on_prepare.code = grpc.StatusCode.UNAVAILABLE
    client = make_client(call_timeout_s=1.5, retry_initial_s=0.05, retry_max_s=0.1)
    client.prepare(G, [c1])
    assert len(driver.calls) > 10


def test_our_own_deadline(driver, make_client, c1):
    """A call that hangs ends with the budget, is not repeated, and counts as unanswered."""
    driver.on_prepare.hang = True
    client = make_client(call_timeout_s=0.6)
    assert client.is_registered(G)
    started = time.monotonic()
    result = client.prepare(G, [c1])[c1.uid]
    assert 0.5 < time.monotonic() - started < 1.5
    assert isinstance(result.error, DriverUnavailableError)
    assert result.error.code == "DEADLINE_EXCEEDED"
    assert "0.6 s" in str(result.error)
    assert (result.called, result.answered) == (True, False)
    assert len(driver.calls) == 1


def test_driver_that_dies_during_the_call(driver, make_client, c1):
    """A call that its driver took to the grave was made, and not answered."""
    driver.on_prepare.hang = True
    client = make_client()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.prepare, G, [c1])
        assert driver.wait_calls()
        driver.die()
        result = future.result(timeout=5)[c1.uid]
    assert isinstance(result.error, DriverUnavailableError)
    assert "disconnected" in str(result.error)
    assert isinstance(result.error.__cause__, grpc.RpcError)
    assert (result.called, result.answered) == (True, False)


def test_driver_that_restarts_during_the_call(driver, make_client, c1):
    """C45: a call whose driver is back in a moment succeeds in the next attempt."""
    driver.on_prepare.hang = True
    client = make_client(retry_initial_s=0.1)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.prepare, G, [c1])
        assert driver.wait_calls()
        driver.on_prepare.hang = False
        driver.on_prepare.delay_s = 30.0
        driver.die()
        driver.on_prepare.delay_s = 0.0
        driver.start()
        result = future.result(timeout=5)[c1.uid]
    assert (result.error, result.answered) == (None, False)


def test_orderly_end_lets_calls_finish(driver, make_client, c1, eventually):
    """A driver that takes its registration back may still answer the calls in flight."""
    driver.on_prepare.delay_s = 0.4
    client = make_client()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.prepare, G, [c1])
        assert driver.wait_calls()
        driver.registration_path.unlink()
        eventually(lambda: not client.registered_drivers())
        assert future.result(timeout=5)[c1.uid].error is None


def test_driver_that_was_down_answers_soon_after_its_return(driver, make_client, c1):
    """C63: failed calls while a driver is down do not delay calls once it is back."""
    client = make_client()
    assert client.is_registered(G)
    driver.die()
    for _ in range(5):
        assert client.prepare(G, [c1])[c1.uid].error is not None
    driver.start()
    assert driver.wait_registered()
    started = time.monotonic()
    assert client.prepare(G, [c1])[c1.uid].error is None
    assert time.monotonic() - started < 1


def test_idle_connection(driver, make_client, c1, monkeypatch, eventually):
    """C58: a connection that goes idle comes back by itself, and a call after it does not hang."""
    assert ("grpc.client_idle_timeout_ms", 2**31 - 1) in channel.CHANNEL_OPTIONS
    monkeypatch.setattr(
        channel,
        "CHANNEL_OPTIONS",
        (*channel.CHANNEL_OPTIONS, ("grpc.client_idle_timeout_ms", 1000)),
    )
    client = make_client()
    for _ in range(2):
        await_connection(client, eventually)
        time.sleep(1.3)
        started = time.monotonic()
        assert client.prepare(G, [c1])[c1.uid].error is None
        assert time.monotonic() - started < 1


def test_proxy_variables_are_ignored(make_driver, make_client, c1, monkeypatch):
    """C62: a proxy in the environment is not for unix sockets."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    make_driver()
    assert make_client().prepare(G, [c1])[c1.uid].error is None


class Tap:
    """A socket in front of another one that keeps what clients send."""

    def __init__(self, path, behind):
        self.heard = bytearray()
        self._behind = str(behind)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._behind)
            threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source, target, keep):
        with source, contextlib.suppress(OSError):
            while data := source.recv(65536):
                if keep:
                    self.heard += data
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_authority_is_localhost(root, registry, make_driver, make_client, c1):
    """C61: what goes over the wire as :authority is "localhost", never a path."""
    hidden = registry / ".hidden-reg.sock"
    endpoint = root / "plugins" / "tapped.sock"
    driver = make_driver(registration_file=hidden.name, announced_endpoint=str(endpoint))
    taps = [
        Tap(registry / "tapped-reg.sock", hidden),
        Tap(endpoint, driver.endpoint_path),
    ]
    client = make_client()
    assert client.is_registered(G)
    assert client.prepare(G, [c1])[c1.uid].error is None
    assert client.unprepare(G, [c1])[c1.uid].error is None
    client.close()
    for tap in taps:
        tap.close()
        # HPACK: the name, or its number in the static table, then a text of nine bytes.
        assert re.search(rb"(:authority|\x41|\x01|\x11)\x09localhost", tap.heard)
        assert b"%2F" not in tap.heard
    assert b"/pluginregistration.Registration/GetInfo" in taps[0].heard
    assert b"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources" in taps[1].heard


def test_odd_characters_in_paths(root, make_driver, make_client, c1):
    """A socket's path may hold what has a meaning in a URI."""
    folder = root / "plugins" / "a b%20c#d?e:f"
    make_driver(plugin_dir=folder)
    assert make_client().prepare(G, [c1])[c1.uid].error is None


def test_large_answer(driver, make_client, c1):
    """C81: ten thousand long CDI device IDs are read."""
    ids = tuple(f"gpu.example.com/gpu={number:0>300}" for number in range(10_000))
    driver.devices = {c1.uid: [PreparedDevice("node-a", "gpu-0", cdi_device_ids=ids)]}
    result = make_client().prepare(G, [c1])[c1.uid]
    assert result.error is None
    assert result.devices[0].cdi_device_ids == ids


def test_long_status_text(driver, make_client, c1):
    """C83: a status text that outgrows gRPC's default limit is still an answer, cut short."""
    driver.on_prepare.fail_times = ALWAYS
    driver.on_prepare.code = grpc.StatusCode.UNKNOWN
    driver.on_prepare.error = "x" * 100_000
    result = make_client().prepare(G, [c1])[c1.uid]
    assert isinstance(result.error, DriverRefusedError)
    assert result.error.code == "UNKNOWN"
    assert "xxx" in str(result.error)
    assert len(str(result.error)) < 1300


@pytest.mark.parametrize("verb", ["prepare", "unprepare"])
def test_lying_answers(driver, make_client, c1, c2, caplog, verb):  # noqa: PLR0917 (fixtures)
    """C83: whatever is left out or added, each claim asked for has its own result."""
    behaviour = getattr(driver, f"on_{verb}")
    behaviour.omit = [c1.uid]
    behaviour.foreign = ["ffffffff-ffff-4fff-8fff-ffffffffffff"]
    behaviour.empty = [c2.uid]
    results = getattr(make_client(), verb)(G, [c1, c2])
    assert set(results) == {c1.uid, c2.uid}
    assert isinstance(results[c1.uid].error, DriverProtocolError)
    assert results[c1.uid].called
    assert results[c2.uid].error is None
    (warning,) = caplog.records
    assert warning.driver == G
    assert warning.claim_uid == ["ffffffff-ffff-4fff-8fff-ffffffffffff"]


@pytest.mark.parametrize("verb", ["prepare", "unprepare"])
def test_answer_that_is_none(driver, make_client, c1, verb):
    """C83: bytes that are no answer are the driver's fault, and not a call without answer."""
    getattr(driver, f"on_{verb}").garbage = b"\xff\xff"
    result = getattr(make_client(), verb)(G, [c1])[c1.uid]
    assert isinstance(result.error, DriverProtocolError)
    assert (result.called, result.answered) == (True, True)
    assert len(driver.calls) == 1


def test_close_also_ends_calls_to_plugins_that_left(driver, make_client, c1, eventually):
    """A call that outlives its plugin's registration does not outlive the client."""
    driver.on_prepare.hang = True
    client = make_client(call_timeout_s=60.0)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.prepare, G, [c1])
        assert driver.wait_calls()
        driver.registration_path.unlink()
        eventually(lambda: not client.registered_drivers())
        client.close()
        result = future.result(timeout=2)[c1.uid]
    assert (result.called, result.answered) == (True, False)


def test_hanging_driver_holds_up_nobody_else(make_driver, make_client):
    """C84: fifty calls to one driver are done while another driver hangs; close does not wait."""
    make_driver()
    hanging = make_driver(N)
    hanging.on_prepare.hang = True
    client = make_client(call_timeout_s=60.0)
    assert client.is_registered(G)
    assert client.is_registered(N)
    claims = [ClaimRef(ClaimUID(f"uid-{number}"), "default", f"c{number}") for number in range(50)]
    with ThreadPoolExecutor(16) as pool:
        stuck = pool.submit(client.prepare, N, claims[:1])
        assert hanging.wait_calls()
        started = time.monotonic()
        results = list(pool.map(lambda claim: client.prepare(G, [claim]), claims))
        assert time.monotonic() - started < 2
        assert all(
            result[claim.uid].error is None for result, claim in zip(results, claims, strict=True)
        )
        assert not stuck.done()
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < 1.5
        result = stuck.result(timeout=2)["uid-0"]
    assert isinstance(result.error, DriverUnavailableError)
    assert result.error.code == "CANCELLED"
    assert (result.called, result.answered) == (True, False)


def test_closed_client_calls_nobody(driver, make_client, c1):
    """After close a call fails at once, and nothing leaves the process."""
    client = make_client()
    assert client.is_registered(G)
    client.close()
    result = client.prepare(G, [c1])[c1.uid]
    assert isinstance(result.error, DriverUnavailableError)
    assert not result.called
    assert driver.calls == []


def test_close_ends_retries(driver, make_client, c1):
    """Closing interrupts the pause between two attempts."""
    driver.on_prepare.fail_times = ALWAYS
    driver.on_prepare.code = grpc.StatusCode.UNAVAILABLE
    client = make_client(call_timeout_s=60.0, retry_initial_s=30.0, retry_max_s=30.0)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.prepare, G, [c1])
        assert driver.wait_calls()
        time.sleep(0.1)
        client.close()
        result = future.result(timeout=2)[c1.uid]
    assert isinstance(result.error, DriverUnavailableError)
    assert (result.called, result.answered) == (True, False)
