"""Drivers that misbehave: none of them may cost anybody else more than a moment (I5, I8)."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import rogue
from rogue import Rogue

from drastate.drivers import registration
from drastate.drivers.channel import ANSWER_MAX_BYTES
from drastate.errors import (
    DriverNotRegisteredError,
    DriverProtocolError,
    DriverRefusedError,
    DriverUnavailableError,
)
from drastate.model import DriverName, PreparedDevice
from drastate.testing.driver import ALWAYS

G = DriverName("gpu.example.com")
N = DriverName("nic.example.com")
BAD = DriverName("bad.example.com")
REPOSITORY = Path(__file__).parents[3]

NOT_GRPC = [
    rogue.silent,
    rogue.closes_at_once,
    rogue.speaks_http1,
    rogue.sends_garbage,
    rogue.settings_then_silence,
    rogue.goaway_storm,
    rogue.slow_loris,
]


def connected(client, driver):
    return [info.endpoint for info in client.plugins() if info.driver == driver and info.connected]


def our_threads():
    return [each.name for each in threading.enumerate() if each.name.startswith("drastate")]


@pytest.fixture
def processes(registry):
    """Starts example drivers as processes, and kills them in the end."""
    with contextlib.ExitStack() as stack:

        def run(*options):
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "drastate", "example-driver", *options),
                    *("--plugins-registry", str(registry)),
                ],
                stdout=subprocess.PIPE,
                text=True,
                cwd=REPOSITORY,
            )
            stack.callback(process.wait)
            stack.callback(process.stdout.close)
            stack.callback(process.kill)
            assert process.stdout.readline().startswith("ready")
            return process

        yield run


# --- in the registry folder -----------------------------------------------------------------------


@pytest.mark.parametrize("serve", NOT_GRPC)
def test_registration_socket_that_speaks_no_grpc(registry, make_driver, make_client, caplog, serve):
    """C52: whatever it does, it is no driver, costs a line or two, and close does not wait for it."""
    caplog.set_level(logging.INFO)
    with Rogue(registry / "a-rogue-reg.sock", serve):
        driver = make_driver()
        client = make_client(registration_timeout_s=0.6)
        assert driver.wait_registered(timeout_s=5)
        time.sleep(1.5)
        assert client.registered_drivers() == (G,)
        lines = [each for each in caplog.records if "rogue" in str(getattr(each, "endpoint", ""))]
        assert 1 <= len(lines) <= 3
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < 2


@pytest.mark.parametrize("serve", [rogue.silent, rogue.settings_then_silence])
def test_many_silent_sockets_delay_nobody(registry, make_driver, make_client, serve, eventually):
    """I5: a good driver is usable about a second after its start, whatever 64 others do not say."""
    with contextlib.ExitStack() as stack:
        for number in range(64):
            stack.enter_context(Rogue(registry / f"a-{number:02}-reg.sock", serve))
        time.sleep(0.02)
        driver = make_driver()
        started = time.monotonic()
        client = make_client(registration_timeout_s=30.0)
        assert driver.wait_registered(timeout_s=10)
        at_start_s = time.monotonic() - started
        eventually(lambda: connected(client, G))
        late = make_driver(N, start=False)
        started = time.monotonic()
        late.start()
        assert late.wait_registered(timeout_s=10)
        later_s = time.monotonic() - started
        # A second on an idle machine; what it must not be is the 30 s that each of them may take.
        assert at_start_s < 4
        assert later_s < 4
        limit = registration._QUICK_MAX + registration._SLOW_MAX
        assert our_threads().count("drastate-handshake") <= limit
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < 3


def test_slow_driver_registers_among_many_silent_ones(registry, make_driver, make_client):
    """A driver that takes a second for its handshake gets its chance when the silent ones rest."""
    with contextlib.ExitStack() as stack:
        for number in range(64):
            stack.enter_context(Rogue(registry / f"a-{number:02}-reg.sock", rogue.silent))
        time.sleep(0.02)
        driver = make_driver(info_delay_s=1.0)
        make_client(registration_timeout_s=2.0)
        assert driver.wait_registered(timeout_s=60)


def test_name_that_changes_with_each_answer(make_driver, make_client, caplog, eventually):
    """A plugin is registered under the name of its last answer, and under no other."""
    caplog.set_level(logging.INFO)
    good = make_driver()
    driver = make_driver("a.example.com", announced_name="n-0.example.com")
    client = make_client()
    assert good.wait_registered()
    for number in range(1, 20):
        driver.announced_name = f"n-{number}.example.com"
        driver.restart()
        assert driver.wait_registered()
    last = DriverName("n-19.example.com")
    eventually(lambda: client.registered_drivers() == (G, last))


def test_driver_that_claims_the_name_of_another(make_driver, make_client, c1, eventually):
    """Under one name the newest plugin is called, and the one before again when it has left."""
    real = make_driver()
    client = make_client()
    assert client.prepare(G, [c1])[c1.uid].error is None
    thief = make_driver("thief.example.com", announced_name=G)
    thief.on_prepare.fail_times = ALWAYS
    thief.on_prepare.error = "mine now"
    eventually(lambda: len(connected(client, G)) == 2)
    assert "mine now" in str(client.prepare(G, [c1])[c1.uid].error)
    assert "thief.example.com" in client.prepare(G, [c1])[c1.uid].error.endpoint
    thief.stop()
    eventually(lambda: len(connected(client, G)) == 1)
    assert client.prepare(G, [c1])[c1.uid].error is None
    assert real.prepare_calls[c1.uid] == 2


def test_socket_that_is_deleted_during_its_handshake(make_driver, make_client, eventually):
    """A driver whose registration socket goes while it is asked is not registered."""
    driver = make_driver(info_delay_s=0.5)
    client = make_client()
    eventually(lambda: driver.info_calls == 1)
    driver.registration_path.unlink()
    time.sleep(1)
    assert client.registered_drivers() == ()
    driver.restart()
    assert driver.wait_registered()
    eventually(lambda: connected(client, G))


def test_socket_that_is_deleted_after_its_confirmation(
    make_driver, make_client, monkeypatch, eventually
):
    """Nothing stays registered of a socket that has gone the moment its driver was told."""
    driver = make_driver()
    client = make_client(start=False)
    tell = registration.Handshake.tell

    def tell_and_delete(handshake, refusal):
        tell(handshake, refusal)
        driver.registration_path.unlink()
        eventually(lambda: not client._watcher._entries)

    monkeypatch.setattr(registration.Handshake, "tell", tell_and_delete)
    client.start()
    assert driver.wait_registered()
    eventually(lambda: not client._watcher._running)
    assert client.registered_drivers() == ()


def test_socket_that_goes_before_it_was_tried_is_not_waited_for(
    make_driver, make_client, monkeypatch, eventually
):
    """The first look is over when nothing is left to be tried."""
    monkeypatch.setattr(registration, "_QUICK_MAX", 0)
    driver = make_driver()
    client = make_client(first_look_s=60.0)
    eventually(lambda: client._watcher._entries)
    assert not client._watcher.first_look.is_set()
    driver.stop()
    assert client._watcher.first_look.wait(5)


def test_registration_socket_swapped_for_a_link(root, registry, make_driver, make_client):
    """C54: what has been put in the place of a socket since it was seen is not connected to."""
    with Rogue(root / "elsewhere.sock", rogue.silent) as elsewhere:
        client = make_client(start=False)
        driver = make_driver()
        found = client._watcher._folder.look()
        driver.registration_path.unlink()
        driver.registration_path.symlink_to(elsewhere.path)
        client._watcher._compare(found)
        client._watcher._start_handshakes()
        (run,) = client._watcher._running.values()
        run.thread.join(10)
        assert "no answer" in run.entry.problem
        assert elsewhere.accepted == 0
        assert client.registered_drivers() == ()


@pytest.mark.parametrize("leads_to", ["outside", "file", "nothing", "loop"])
def test_endpoint_swapped_after_registration(root, make_driver, make_client, c1, leads_to):
    """C54: the endpoint is checked again at each connect, and nothing else is connected to."""
    driver = make_driver()
    client = make_client()
    assert client.prepare(G, [c1])[c1.uid].error is None
    outside = root.parent / f"{root.name}-outside.sock"
    with Rogue(outside, rogue.settings_then_silence) as elsewhere:
        endpoint, _ = driver._servers
        driver.endpoint_path.unlink()
        if leads_to == "file":
            driver.endpoint_path.write_text("x")
        else:
            target = {"outside": outside, "nothing": root / "none", "loop": driver.endpoint_path}
            driver.endpoint_path.symlink_to(target[leads_to])
        endpoint.die()
        time.sleep(1.5)
        result = client.prepare(G, [c1])[c1.uid]
        assert isinstance(result.error, DriverUnavailableError)
        assert not result.called
        assert elsewhere.accepted == 0
        why = {"outside": "symbolic link", "file": "not a socket"}.get(leads_to, "disconnected")
        assert why in str(result.error)
        assert why in client.explain(G)
        # It is mended as soon as the driver is back.
        driver.restart()
        assert driver.wait_registered()
        deadline = time.monotonic() + 10
        while client.prepare(G, [c1])[c1.uid].error is not None:
            assert time.monotonic() < deadline
    outside.unlink()


def test_endpoint_that_is_made_anew_is_pinned_anew(make_driver, make_client, c1, eventually):
    """C43: a new socket on the endpoint's path is connected to, time and again."""
    driver = make_driver()
    client = make_client()
    for number in range(1, 4):
        eventually(lambda: connected(client, G))
        assert client.prepare(G, [c1])[c1.uid].error is None
        assert driver.prepare_calls[c1.uid] == number
        registration_socket = driver._servers.pop()
        driver._servers[0].die()
        eventually(lambda: not connected(client, G))
        driver._servers[0].__init__(driver.endpoint_path, [driver._make_service("v1")], threads=4)
        driver._servers.append(registration_socket)


# --- at the endpoint ------------------------------------------------------------------------------


@pytest.mark.parametrize("serve", NOT_GRPC)
def test_endpoint_that_speaks_no_grpc(root, make_driver, make_client, c1, caplog, serve):  # noqa: PLR0917
    """I5, I8: calls to it end in time, cost no busy loop and few lines; others are served."""
    caplog.set_level(logging.INFO)
    with Rogue(root / "plugins" / "rogue.sock", serve) as endpoint:
        make_driver()
        bad = make_driver(BAD, announced_endpoint=str(endpoint.path))
        client = make_client(call_timeout_s=1.5)
        assert bad.wait_registered()
        assert client.is_registered(BAD)
        with ThreadPoolExecutor(1) as pool:
            started = time.monotonic()
            stuck = pool.submit(client.unprepare, BAD, [c1])
            assert client.prepare(G, [c1])[c1.uid].error is None
            assert time.monotonic() - started < 2
            result = stuck.result(timeout=10)[c1.uid]
            assert time.monotonic() - started < 4
        assert isinstance(result.error, DriverUnavailableError | DriverRefusedError)
        time.sleep(1)
        assert endpoint.accepted < 40
        lines = [each for each in caplog.records if getattr(each, "driver", None) == BAD]
        assert len(lines) <= 12


def test_goaway_for_too_many_pings(root, make_driver, make_client, c1):
    """A server that sends the connection away during a call is asked again within the budget."""
    with Rogue(root / "plugins" / "rogue.sock", rogue.too_many_pings) as endpoint:
        bad = make_driver(BAD, announced_endpoint=str(endpoint.path))
        client = make_client(call_timeout_s=1.5)
        assert bad.wait_registered()
        started = time.monotonic()
        result = client.prepare(BAD, [c1])[c1.uid]
        assert time.monotonic() - started < 4
        assert isinstance(result.error, DriverUnavailableError)


def test_server_that_cancels_calls(root, make_driver, make_client, c1):
    """C59: a stream that the server cancels at the deadline is a timeout like our own."""
    with Rogue(root / "plugins" / "rogue.sock", rogue.resets_streams) as endpoint:
        bad = make_driver(BAD, announced_endpoint=str(endpoint.path))
        slow = make_driver()
        slow.on_prepare.hang = True
        client = make_client(call_timeout_s=1.0)
        assert bad.wait_registered()
        assert client.is_registered(G)
        theirs = client.prepare(BAD, [c1])[c1.uid]
        ours = client.prepare(G, [c1])[c1.uid]
        assert type(theirs.error) is type(ours.error) is DriverUnavailableError
        assert {theirs.error.code, ours.error.code} <= {"CANCELLED", "DEADLINE_EXCEEDED"}
        assert (theirs.called, theirs.answered) == (ours.called, ours.answered) == (True, False)


@pytest.mark.parametrize("over", [-64, 64, 60 * 1024 * 1024])
@pytest.mark.parametrize("verb", ["prepare", "unprepare"])
def test_answer_around_the_limit(make_driver, make_client, c1, over, verb):
    """C81: an answer below the limit is read, one above it is a clear error, 64 MiB too."""
    driver = make_driver()
    client = make_client()
    size = ANSWER_MAX_BYTES + over
    # One entry of the map: its key is a UID of that length, which nobody asked about.
    inner = size - 60
    key = b"\x0a" + _varint(inner - 5) + b"f" * (inner - 5)
    entry = b"\x0a" + _varint(len(key)) + key
    own = b"\x0a\x26\x0a\x24" + c1.uid.encode()
    assert (len(own + entry) <= ANSWER_MAX_BYTES) is (over < 0)
    getattr(driver, f"on_{verb}").garbage = own + entry
    started = time.monotonic()
    result = getattr(client, verb)(G, [c1])[c1.uid]
    assert time.monotonic() - started < 10
    assert result.called
    assert result.answered
    if over < 0:
        assert result.error is None
    else:
        assert isinstance(result.error, DriverRefusedError)
        assert "an answer may have 4 MiB" in str(result.error)
    # The connection lives on.
    getattr(driver, f"on_{verb}").garbage = None
    assert getattr(client, verb)(G, [c1])[c1.uid].error is None


def _varint(number: int) -> bytes:
    encoded = b""
    while number > 127:
        encoded += bytes([number & 127 | 128])
        number >>= 7
    return encoded + bytes([number])


@pytest.mark.parametrize("kind", ["claims", "devices"])
def test_worst_answer_does_not_stop_the_others(make_driver, make_client, c1, kind):
    """I5: an answer made to be slow to read holds up other threads for a moment, not for seconds."""
    driver = make_driver()
    client = make_client()
    if kind == "claims":
        garbage = b"".join(b"\x0a\x08\x0a\x06%06x" % each for each in range(400_000))
    else:
        devices = b"\x12" + _varint(4_000_000) + b"\x0a\x00" * 2_000_000
        entry = b"\x0a\x24" + c1.uid.encode() + devices
        garbage = b"\x0a" + _varint(len(entry)) + entry
    assert len(garbage) <= ANSWER_MAX_BYTES
    driver.on_prepare.garbage = garbage
    stop = threading.Event()
    worst_s = 0.0

    def watch():
        nonlocal worst_s
        while not stop.is_set():
            started = time.monotonic()
            time.sleep(0.005)
            worst_s = max(worst_s, time.monotonic() - started)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        for _ in range(3):
            result = client.prepare(G, [c1])[c1.uid]
            assert isinstance(result.error, DriverProtocolError)
        stop.set()
        watching.result()
    assert worst_s < 1.0


# --- lies -----------------------------------------------------------------------------------------

FOREIGN = "ffffffff-ffff-4fff-8fff-ffffffffffff"
MEGABYTE = "x" * 1_000_000


@pytest.mark.parametrize("verb", ["prepare", "unprepare"])
@pytest.mark.parametrize(
    ("lie", "error"),
    [
        ({"omit": True}, DriverProtocolError),
        ({"foreign": [FOREIGN]}, None),
        ({"empty": True}, None),
        ({"fail_times": 1, "fails": True, "devices_too": True}, DriverRefusedError),
        ({"fail_times": 1, "fails": True, "error": MEGABYTE}, DriverRefusedError),
        ({"fail_times": 1, "fails": True, "late": True}, DriverRefusedError),
    ],
    ids=["omits", "foreign", "null", "error-and-devices", "1-MB-error", "fails-yet-does-it"],
)
def test_lie_about_one_claim_of_two(make_driver, make_client, c1, c2, verb, lie, error):  # noqa: PLR0917
    """C83: a lie about c1 is c1's alone, whatever it is, for prepare and unprepare."""
    driver = make_driver()
    behaviour = getattr(driver, f"on_{verb}")
    for name, value in lie.items():
        setattr(behaviour, name, {c1.uid} if value is True and name != "devices_too" else value)
    if "late" in lie:
        behaviour.late = True
    results = getattr(make_client(), verb)(G, [c1, c2])
    assert set(results) == {c1.uid, c2.uid}
    assert results[c2.uid].error is None
    if error is None:
        assert results[c1.uid].error is None
    else:
        assert type(results[c1.uid].error) is error
        assert results[c1.uid].devices == ()
        assert len(str(results[c1.uid].error)) < 1300
    assert all((each.called, each.answered) == (True, True) for each in results.values())


@pytest.mark.parametrize(
    "device", [PreparedDevice("", "gpu-0"), PreparedDevice("node-a", ""), PreparedDevice("", "")]
)
def test_device_without_names(make_driver, make_client, c1, c2, device):
    """C83: a device without pool or name fails its claim over the wire too, and not the other."""
    make_driver(devices={c1.uid: [device]})
    results = make_client().prepare(G, [c1, c2])
    assert isinstance(results[c1.uid].error, DriverProtocolError)
    assert results[c2.uid].error is None
    assert len(results[c2.uid].devices) == 1


# --- processes ------------------------------------------------------------------------------------


def test_driver_process_killed_between_receipt_and_answer(
    processes, make_client, root, c1, eventually
):
    """A call whose driver is SIGKILLed after it took it was made, and not answered."""
    log = root / "calls.jsonl"
    process = processes("--hang-prepare", "--call-log", str(log))
    client = make_client(call_timeout_s=5.0)
    assert client.is_registered(G)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.prepare, G, [c1])
        eventually(lambda: log.exists() and c1.uid in log.read_text())
        process.send_signal(signal.SIGKILL)
        result = future.result(timeout=8)[c1.uid]
    assert isinstance(result.error, DriverUnavailableError)
    assert isinstance(result.error.__cause__, grpc.RpcError)
    assert (result.called, result.answered) == (True, False)


def test_driver_process_that_is_stopped(processes, make_driver, make_client, c1, eventually):
    """A SIGSTOPped driver holds up its own calls to their deadline, nobody else's, and comes back."""
    process = processes("--name", N)
    make_driver()
    client = make_client(call_timeout_s=1.5)
    eventually(lambda: connected(client, N))
    process.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            started = time.monotonic()
            future = pool.submit(client.prepare, N, [c1])
            assert client.prepare(G, [c1])[c1.uid].error is None
            result = future.result(timeout=5)[c1.uid]
            assert 1 < time.monotonic() - started < 4
    finally:
        process.send_signal(signal.SIGCONT)
    assert result.error.code == "DEADLINE_EXCEEDED"
    assert (result.called, result.answered) == (True, False)
    eventually(lambda: client.prepare(N, [c1])[c1.uid].error is None)


def test_late_answer(make_driver, make_client, c1, eventually):
    """An answer after the deadline is none, though the driver has done what was asked."""
    driver = make_driver()
    driver.on_prepare.delay_s = 1.2
    client = make_client(call_timeout_s=0.5)
    assert client.is_registered(G)
    result = client.prepare(G, [c1])[c1.uid]
    assert result.error.code == "DEADLINE_EXCEEDED"
    assert (result.called, result.answered) == (True, False)
    eventually(lambda: c1.uid in driver.prepared)
    driver.on_prepare.delay_s = 0.0
    assert client.prepare(G, [c1])[c1.uid].error is None


def test_two_instances_that_kill_each_other(make_driver, make_client, c1, eventually):
    """C45: while two instances register in turn and die, calls go to the one that lives."""
    pair = [make_driver(instance="a"), make_driver(instance="b")]
    client = make_client(retry_initial_s=0.05)
    assert client.is_registered(G)
    for number in range(10):
        victim, survivor = pair[number % 2], pair[1 - number % 2]
        survivor.restart()
        assert survivor.wait_registered()
        victim.die()
        eventually(lambda end=str(survivor.endpoint_path): connected(client, G) == [end])
        before = survivor.prepare_calls[c1.uid]
        result = client.prepare(G, [c1])[c1.uid]
        assert (result.error, survivor.prepare_calls[c1.uid]) == (None, before + 1)
    assert client.registered_drivers() == (G,)


def test_two_hundred_registrations_without_growth(make_driver, make_client, caplog, eventually):
    """I8: a driver that registers in a loop leaves no threads, files or channels, and few lines."""
    caplog.set_level(logging.INFO)
    driver = make_driver()
    client = make_client(registry_poll_s=0.01)

    def cycle(count):
        for _ in range(count):
            driver.restart()
            assert driver.wait_registered()
        eventually(lambda: connected(client, G))
        eventually(lambda: not client._graveyard._resting)

    def count():
        return [len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task")]

    cycle(20)
    caplog.clear()
    before = count()
    cycle(200)
    after = count()
    assert all(new <= old + 8 for old, new in zip(before, after, strict=True)), (before, after)
    # Four kinds of lines, a few at once, then one a minute.
    assert len(caplog.records) <= 30
    assert len(client._watcher._entries) == len(client.plugins()) == 1


HANGING = """
import sys, threading
from pathlib import Path
from drastate.config import Settings
from drastate.drivers import DriverClient
from drastate.model import ClaimRef
client = DriverClient(Path(sys.argv[1]), settings=Settings(driver_concurrency={"*": 1}))
client.start()
client.on_registered(lambda _: threading.Event().wait())
assert client.is_registered("gpu.example.com")
claim = ClaimRef("11111111-1111-4111-8111-111111111111", "default", "c1")
for _ in range(2):
    threading.Thread(
        target=client.prepare, args=("gpu.example.com", [claim]), daemon=True
    ).start()
print("calling", flush=True)
sys.stdin.readline()
"""


def test_process_exit_is_not_blocked(registry, make_driver):
    """C84: a process ends at once although calls, their line, handshakes and callbacks hang."""
    driver = make_driver()
    driver.on_prepare.hang = True
    with Rogue(registry / "a-reg.sock", rogue.silent):
        process = subprocess.Popen(
            [sys.executable, "-c", HANGING, str(registry)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        try:
            assert process.stdout.readline() == "calling\n"
            assert driver.wait_calls()
            started = time.monotonic()
            process.communicate("\n", timeout=20)
            assert time.monotonic() - started < 5
            assert process.returncode == 0
        finally:
            process.kill()
            process.wait()


def test_second_close_waits_for_the_first(make_driver, make_client, monkeypatch):
    """When close returns, everything is closed, whoever called it first."""
    make_driver()
    client = make_client()
    assert client.is_registered(G)
    go_on = threading.Event()
    close = client._watcher.close
    monkeypatch.setattr(client._watcher, "close", lambda: (go_on.wait(10), close()))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.close)
        while not client._closed.is_set():
            time.sleep(0.01)
        second = pool.submit(client.close)
        time.sleep(0.2)
        assert not second.done()
        go_on.set()
        first.result(5)
        second.result(5)


def test_dead_sockets_left_by_the_dozen(registry, make_driver, make_client, c1, eventually):
    """C43: sockets that nobody listens on are tried now and then, and delay nobody."""
    for number in range(100):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(registry / f"a-{number:03}-reg.sock"))
    driver = make_driver()
    started = time.monotonic()
    client = make_client()
    assert driver.wait_registered(timeout_s=10)
    assert time.monotonic() - started < 4
    result = client.prepare(N, [c1])[c1.uid]
    assert isinstance(result.error, DriverNotRegisteredError)
    assert client.prepare(G, [c1])[c1.uid].error is None
