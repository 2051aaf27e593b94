"""Plugins come, go, die and lie; on real sockets."""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from drastate.config import Settings
from drastate.drivers import DriverClient
from drastate.errors import DriverUnavailableError, UsageError
from drastate.model import DriverName
from drastate.testing.driver import FakeDriver, Notification

G = DriverName("gpu.example.com")
N = DriverName("nic.example.com")


def connected(client, driver=G):
    return [info.endpoint for info in client.plugins() if info.driver == driver and info.connected]


def test_driver_registers_and_is_told(make_driver, make_client):
    """A driver that is there at start is registered, connected and told so."""
    driver = make_driver()
    client = make_client()
    assert client.is_registered(G)
    assert not client.is_registered(N)
    assert client.registered_drivers() == (G,)
    assert driver.notifications == [Notification(registered=True, error="")]
    (info,) = client.plugins()
    assert (info.driver, info.api, info.connected) == (G, "v1.DRAPlugin", True)
    assert info.endpoint == str(driver.endpoint_path)
    assert info.registration_socket == str(driver.registration_path)
    assert client.explain(G) == f"registered at {driver.endpoint_path}, connected"
    assert client.explain(N).startswith("not registered; start the driver")


def test_driver_that_comes_later_is_found(make_driver, make_client, eventually):
    """C50: a socket made after start is found by the next look; no event is needed."""
    client = make_client()
    assert not client.is_registered(G)
    driver = make_driver()
    assert driver.wait_registered()
    eventually(lambda: connected(client))


def test_driver_that_leaves_is_deregistered(make_driver, make_client, eventually):
    """A driver that removes its registration socket is not registered any more."""
    driver = make_driver()
    client = make_client()
    assert client.is_registered(G)
    driver.stop()
    eventually(lambda: not client.registered_drivers())
    assert "not registered" in client.explain(G)


def test_killed_driver_is_disconnected(registry, make_client, c1, eventually):
    """C43: a SIGKILLed driver leaves its sockets; calls fail fast until it is back on its path."""
    command = [
        sys.executable,
        "-c",
        "from drastate.cli.example_driver import example_driver as run; run()",
        "--plugins-registry",
        str(registry),
    ]

    def run():
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
        )
        stack.callback(process.wait)
        stack.callback(process.stdout.close)
        stack.callback(process.kill)
        assert process.stdout.readline().startswith("ready")
        return process

    with contextlib.ExitStack() as stack:
        process = run()
        client = make_client()
        assert client.prepare(G, [c1])[c1.uid].error is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        eventually(lambda: not connected(client), timeout_s=5)
        assert client.is_registered(G)
        assert "disconnected since" in client.explain(G)
        started = time.monotonic()
        result = client.prepare(G, [c1])[c1.uid]
        assert time.monotonic() - started < 1
        assert isinstance(result.error, DriverUnavailableError)
        assert "disconnected" in str(result.error)
        assert not result.called
        run()
        eventually(lambda: connected(client), timeout_s=5)
        eventually(lambda: client.prepare(G, [c1])[c1.uid].error is None)


def test_endpoint_that_comes_back_is_connected_without_a_new_registration(
    make_driver, make_client, c1, eventually
):
    """C43: when only the endpoint is made anew, the connection returns; the folder stays still."""
    driver = make_driver()
    client = make_client()
    eventually(lambda: connected(client))
    news = []
    client.on_registered(news.append)
    told = len(driver.notifications)
    with contextlib.ExitStack() as stack:
        endpoint, _ = driver._servers
        endpoint.die()
        eventually(lambda: not connected(client))
        successor = FakeDriver(
            driver.plugins_registry.parent / "plugins",  # not in the watched folder
            plugin_dir=driver.endpoint_path.parent,
        ).start()
        stack.callback(successor.stop)
        eventually(lambda: connected(client))
        eventually(lambda: news == [G])
        assert client.prepare(G, [c1])[c1.uid].error is None
        assert successor.prepare_calls[c1.uid] == 1
    assert len(driver.notifications) == told


def test_rolling_update(make_driver, make_client, c1, eventually):
    """C45: the newer instance is called, the older stands in, and the name outlives the older."""
    old = make_driver(instance="old")
    client = make_client()
    assert client.prepare(G, [c1])[c1.uid].error is None
    new = make_driver(instance="new")
    eventually(lambda: len(connected(client)) == 2)
    assert client.unprepare(G, [c1])[c1.uid].error is None
    assert (old.prepare_calls[c1.uid], new.unprepare_calls[c1.uid]) == (1, 1)
    new.die()
    assert client.prepare(G, [c1])[c1.uid].error is None
    assert old.prepare_calls[c1.uid] == 2
    new.start()
    assert new.wait_registered()
    eventually(lambda: len(connected(client)) == 2)
    old.stop()
    eventually(lambda: len(connected(client)) == 1)
    assert client.registered_drivers() == (G,)
    assert client.prepare(G, [c1])[c1.uid].error is None
    assert new.prepare_calls[c1.uid] == 1


@pytest.mark.parametrize("names", [("a", "z"), ("z", "a")])
def test_newer_socket_wins_after_our_restart(make_driver, make_client, c1, names):
    """C45: of the plugins there at start the one with the newer socket wins, whatever its name."""
    old = make_driver(instance=names[0])
    time.sleep(0.02)
    new = make_driver(instance=names[1])
    client = make_client()
    assert client.is_registered(G)
    assert client.prepare(G, [c1])[c1.uid].error is None
    assert (old.prepare_calls[c1.uid], new.prepare_calls[c1.uid]) == (0, 1)


def test_slow_handshake_does_not_change_the_order(make_driver, make_client, c1, eventually):
    """C45: the order is that of the sockets, not that in which the handshakes end."""
    old = make_driver(instance="old", info_delay_s=0.4)
    time.sleep(0.02)
    new = make_driver(instance="new")
    client = make_client()
    eventually(lambda: len(connected(client)) == 2)
    assert client.prepare(G, [c1])[c1.uid].error is None
    assert (old.prepare_calls[c1.uid], new.prepare_calls[c1.uid]) == (0, 1)


def test_socket_replaced_many_times(make_driver, make_client, c1, eventually):
    """C46: after any number of quick restarts on one path the last socket is the registered one."""
    driver = make_driver()
    client = make_client()
    assert client.is_registered(G)
    for number in range(50):
        if number % 2:
            driver.restart()
        else:
            driver.stop()
            driver.start()
        time.sleep(0.001 * number)
    assert driver.wait_registered(timeout_s=2)
    eventually(lambda: connected(client))
    assert client.prepare(G, [c1])[c1.uid].error is None
    assert len(client.plugins()) == 1
    assert all(told.registered for told in driver.notifications)


def test_failed_notification_is_a_failed_registration(make_driver, make_client, eventually):
    """C49: a driver that did not hear that it is registered is not, and hears it again."""
    driver = make_driver(notify_fail_times=1)
    client = make_client()
    assert driver.wait_notified(1)
    eventually(lambda: not client.registered_drivers())
    assert driver.wait_notified(2, timeout_s=5)
    eventually(lambda: connected(client))
    assert driver.notifications == [Notification(registered=True, error="")] * 2


def test_foreign_things_in_the_folder(registry, make_driver, make_client, caplog):
    """C52: whatever else lies in the folder, the DRA drivers in it register, with no error."""
    caplog.set_level(logging.INFO)
    (registry / "x.txt").write_text("x")
    (registry / "deep").mkdir()
    for number in range(200):
        (registry / "deep" / f"{number}").write_text("")
    csi = make_driver("csi.example.com", plugin_type="CSIPlugin")
    make_driver()
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(registry / "deaf.sock"))
        deaf.listen()
        client = make_client(registration_timeout_s=0.3)
        assert client.is_registered(G)
        assert csi.wait_notified()
        assert client.registered_drivers() == (G,)
        time.sleep(0.7)
        assert csi.info_calls == 1
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_other_plugin_type_is_told_what_is_accepted(make_driver, make_client):
    """C53: a plugin of another type learns which type is registered here."""
    driver = make_driver(plugin_type="DevicePlugin")
    make_client()
    assert driver.wait_notified()
    assert not driver.notifications[0].registered
    assert "only DRAPlugin" in driver.notifications[0].error


def test_refused_type_is_asked_again_after_a_restart(make_driver, make_client, eventually):
    """C53: a new socket on the path is a new plugin, which may be of the right type."""
    driver = make_driver(plugin_type="DevicePlugin")
    client = make_client()
    assert driver.wait_notified()
    driver.plugin_type = "DRAPlugin"
    driver.restart()
    assert driver.wait_registered()
    eventually(lambda: connected(client))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"announced_name": ""}, "empty"),
        ({"announced_name": "GPU.example.com"}, "DNS subdomain"),
        ({"announced_name": "x" * 300}, "300 characters"),
        ({"announced_endpoint": "dra.sock"}, "not an absolute path"),
        ({"announced_endpoint": "/run/other.sock"}, "not inside"),
        ({"versions": ["1.0.0"]}, '"1.0.0"'),
        ({"versions": []}, "empty"),
    ],
)
def test_refusals_reach_the_plugin(make_driver, make_client, eventually, fields, reason):
    """C54, C55: what is wrong is told to the plugin, and to whoever asks for its driver."""
    driver = make_driver(**fields)
    client = make_client()
    assert driver.wait_notified()
    assert driver.notifications[0].registered is False
    assert reason in driver.notifications[0].error
    assert not client.registered_drivers()
    if "announced_name" not in fields:
        eventually(lambda: reason in client.explain(G))


def test_plugin_is_asked_again_when_its_answer_may_have_changed(
    make_driver, make_client, eventually
):
    """A refused plugin that mends its answer is registered without a new socket."""
    driver = make_driver(versions=["1.0.0"])
    client = make_client()
    assert driver.wait_notified()
    driver.versions = ["v1.DRAPlugin"]
    assert driver.wait_registered(timeout_s=5)
    eventually(lambda: connected(client))


def test_empty_endpoint_is_the_registration_socket(make_driver, make_client, eventually):
    """A plugin that names no endpoint is called on the socket that it registered with."""
    driver = make_driver(announced_endpoint="")
    client = make_client()
    assert client.is_registered(G)
    assert client.plugins()[0].endpoint == str(driver.registration_path)


def test_version_changes_with_a_new_registration(make_driver, make_client, c1, eventually):
    """C55: a driver that comes back with v1 is called in v1, also for what it prepared before."""
    driver = make_driver(versions=["v1beta1.DRAPlugin"])
    client = make_client()
    assert client.prepare(G, [c1])[c1.uid].error is None
    driver.versions = ["v1.DRAPlugin", "v1beta1.DRAPlugin"]
    driver.restart()
    assert driver.wait_registered()
    assert client.unprepare(G, [c1])[c1.uid].error is None
    assert [call.api for call in driver.calls] == ["v1beta1", "v1"]


def test_second_socket_for_one_endpoint_is_refused(make_driver, make_client, eventually):
    """Two live registration sockets cannot register the same endpoint of a driver."""
    first = make_driver()
    client = make_client()
    assert client.is_registered(G)
    second = make_driver(instance="2", announced_endpoint=str(first.endpoint_path))
    assert second.wait_notified()
    assert not second.notifications[0].registered
    assert "already" in second.notifications[0].error
    assert str(first.registration_path) in second.notifications[0].error
    assert len(client.plugins()) == 1


def test_dead_registration_socket_gives_its_endpoint_up(make_driver, make_client, c1, eventually):
    """C43: a successor takes over an endpoint whose dead owner left its registration socket."""
    first = make_driver(registration_file="pod-1-reg.sock")
    client = make_client()
    assert client.is_registered(G)
    first.die()
    second = make_driver(registration_file="pod-2-reg.sock")
    assert second.wait_registered()
    eventually(lambda: connected(client))
    assert client.prepare(G, [c1])[c1.uid].error is None
    assert [info.registration_socket for info in client.plugins()] == [
        str(second.registration_path)
    ]
    assert first.registration_path.exists()


def test_hanging_socket_delays_nobody(registry, make_driver, make_client):
    """C52, I5: a socket that never answers its handshake holds up nobody else, nor the start."""
    with contextlib.ExitStack() as stack:
        for number in range(3):
            deaf = stack.enter_context(socket.socket(socket.AF_UNIX))
            deaf.bind(str(registry / f"deaf-{number}.sock"))
            deaf.listen()
        driver = make_driver()
        started = time.monotonic()
        client = make_client(registration_timeout_s=30.0, first_look_s=1.0)
        assert driver.wait_registered(timeout_s=2)
        assert client.is_registered(G)
        assert time.monotonic() - started < 2
        assert not client.is_registered(N)
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < 2


def test_unknown_driver_waits_for_the_first_look_only(registry, make_client):
    """The wait for plugins that were there at start is bounded, and happens once."""
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(registry / "deaf.sock"))
        deaf.listen()
        client = make_client(first_look_s=0.4)
        started = time.monotonic()
        assert not client.is_registered(G)
        assert 0.3 < time.monotonic() - started < 2
        started = time.monotonic()
        for _ in range(10):
            assert not client.is_registered(G)
        assert time.monotonic() - started < 0.3


def test_leftover_socket_is_tried_again_and_registered_on_return(
    make_driver, make_client, eventually
):
    """C43: a dead socket found at start is no plugin; its driver's return is noticed."""
    driver = make_driver()
    driver.die()
    client = make_client()
    assert not client.is_registered(G)
    driver.start()
    assert driver.wait_registered()
    eventually(lambda: connected(client))


def test_folder_that_vanishes_and_returns(root, registry, make_driver, make_client, eventually):
    """A registry folder that is removed takes its plugins along; a new one is watched again."""
    driver = make_driver()
    client = make_client()
    assert client.is_registered(G)
    shutil.rmtree(registry)
    eventually(lambda: not client.registered_drivers())
    registry.mkdir()
    driver.restart()
    assert driver.wait_registered()
    eventually(lambda: connected(client))


def test_news_of_registrations(make_driver, make_client, eventually):
    """Callbacks hear of a driver when it can be called, also when one of them fails or is slow."""
    client = make_client()
    heard = []
    release = threading.Event()

    def fail(_):
        raise RuntimeError

    def be_slow(driver):
        heard.append(driver)
        release.wait(10)

    client.on_registered(fail)
    client.on_registered(be_slow)
    driver = make_driver()
    eventually(lambda: heard == [G])
    make_driver(N).wait_registered()
    eventually(lambda: connected(client, N))
    driver.restart()
    release.set()
    eventually(lambda: set(heard) == {G, N})
    eventually(lambda: heard.count(G) == 2)


@pytest.mark.parametrize("settings", [{}, {"endpoint_root": Path("/")}])
def test_default_root_is_beside_the_registry(make_driver, root, settings, make_client):
    """C54: an endpoint outside the folder that holds the registry is refused, unless allowed."""
    other = root.parent / f"{root.name}-other"
    other.mkdir()
    try:
        driver = make_driver(plugin_dir=other)
        client = make_client(**settings)
        assert driver.wait_notified()
        assert driver.notifications[0].registered is bool(settings)
        assert client.is_registered(G) is bool(settings)
        driver.stop()
    finally:
        shutil.rmtree(other)


@pytest.mark.parametrize(
    ("registry_path", "endpoint_root"),
    [("missing", None), ("file", None), (".", Path()), (".", Path("relative"))],
)
def test_bad_folders_are_errors_at_once(root, registry_path, endpoint_root):
    """C54: a registry that is no folder and a relative root are errors at the start."""
    (root / "file").write_text("")
    with pytest.raises(UsageError):
        DriverClient(root / registry_path, endpoint_root=endpoint_root)


def test_relative_registry_is_resolved(registry, make_driver, monkeypatch):
    """A registry folder relative to the working folder is as good as an absolute one."""
    monkeypatch.chdir(registry.parent)
    driver = make_driver()
    client = DriverClient(Path("plugins_registry"), settings=Settings(registry_poll_s=0.03))
    client.start()
    try:
        assert client.is_registered(G)
        assert client.plugins()[0].endpoint == str(driver.endpoint_path)
    finally:
        client.close()


def test_life_of_a_client(make_client):
    """Starting twice and closing twice is fine, starting after closing is not."""
    client = make_client(start=False)
    assert not client.is_registered(G)
    client.start()
    client.start()
    client.close()
    client.close()
    assert client.plugins() == ()
    with pytest.raises(UsageError):
        client.start()


def test_nothing_leaks_when_plugins_come_and_go(make_driver, make_client, eventually):
    """A hundred restarts leave no threads and no descriptors behind."""
    driver = make_driver()
    client = make_client(registry_poll_s=0.01)

    def cycle(count):
        for _ in range(count):
            driver.restart()
            assert driver.wait_registered()
        eventually(lambda: connected(client))
        time.sleep(1)  # channels rest before they are closed

    def count():
        return tuple(len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task"))

    cycle(10)
    files, threads = count()
    cycle(100)
    files_after, threads_after = count()
    assert files_after <= files + 8
    assert threads_after <= threads + 8
    client.close()

    def ours():
        return [each.name for each in threading.enumerate() if each.name.startswith("drastate")]

    eventually(lambda: ours() == [], timeout_s=3)
