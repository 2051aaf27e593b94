"""The fake driver itself, seen by a plain gRPC client."""

from __future__ import annotations

import contextlib
import json
import socket
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from drastate.drivers._pb import dra_v1, dra_v1beta1
from drastate.drivers._pb import pluginregistration_v1 as registration
from drastate.model import PreparedDevice
from drastate.testing.driver import ALWAYS, FakeDriver, node_root

UID = "11111111-1111-4111-8111-111111111111"
OTHER = "22222222-2222-4222-8222-222222222222"
MESSAGES = {"v1": dra_v1, "v1beta1": dra_v1beta1}


@pytest.fixture
def root():
    with node_root() as folder:
        yield folder


@pytest.fixture
def driver(root):
    with FakeDriver(root / "plugins_registry") as driver:
        yield driver


def call(path, method, request, response):
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
        stub = channel.unary_unary(
            method,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )
        return stub(request, timeout=10)


def dra(driver, verb, *uids, api="v1"):
    messages = MESSAGES[api]
    claims = [messages.Claim(namespace="default", uid=uid, name=f"n-{uid}") for uid in uids]
    name = f"Node{verb}Resources"
    return call(
        driver.endpoint_path,
        f"/k8s.io.kubelet.pkg.apis.dra.{api}.DRAPlugin/{name}",
        getattr(messages, f"{name}Request")(claims=claims),
        getattr(messages, f"{name}Response"),
    ).claims


def get_info(driver):
    return call(
        driver.registration_path,
        "/pluginregistration.Registration/GetInfo",
        registration.InfoRequest(),
        registration.PluginInfo,
    )


def notify(driver, **fields):
    return call(
        driver.registration_path,
        "/pluginregistration.Registration/NotifyRegistrationStatus",
        registration.RegistrationStatus(**fields),
        registration.RegistrationStatusResponse,
    )


def is_refused(path):
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(str(path))
        return False
    return True


def test_registration(driver):
    """It says what a driver says, and keeps what it is told."""
    info = get_info(driver)
    assert (info.type, info.name) == ("DRAPlugin", "gpu.example.com")
    assert info.endpoint == str(driver.endpoint_path)
    assert list(info.supported_versions) == ["v1.DRAPlugin", "v1beta1.DRAPlugin"]
    notify(driver, plugin_registered=False, error="why not")
    assert not driver.wait_registered(timeout_s=0.05)
    notify(driver, plugin_registered=True)
    assert driver.wait_registered()
    assert driver.notifications == [(False, "why not"), (True, "")]
    driver.notify_fail_times = 1
    with pytest.raises(grpc.RpcError):
        notify(driver, plugin_registered=True)
    assert driver.info_calls == 1


def test_what_it_says_can_be_changed(driver):
    """Type, versions, name and endpoint are read at each GetInfo."""
    driver.plugin_type = "Other"
    driver.versions = ["1.0.0"]
    driver.announced_name = ""
    driver.announced_endpoint = "x"
    info = get_info(driver)
    assert (info.type, info.name, info.endpoint) == ("Other", "", "x")
    assert list(info.supported_versions) == ["1.0.0"]


@pytest.mark.parametrize("api", ["v1", "v1beta1"])
def test_prepare_and_unprepare(driver, api):
    """Claims are prepared with one device each, unprepared, and every call is counted."""
    claims = dra(driver, "Prepare", UID, OTHER, api=api)
    (device,) = claims[UID].devices
    assert (device.pool_name, device.device_name) == ("node-a", "gpu-0")
    assert list(device.cdi_device_ids) == ["gpu.example.com/gpu=gpu-0"]
    assert set(driver.prepared) == {UID, OTHER}
    assert dra(driver, "Unprepare", UID, api=api)[UID].error == ""
    assert dra(driver, "Unprepare", UID, api=api)[UID].error == ""
    assert set(driver.prepared) == {OTHER}
    assert driver.prepare_calls == {UID: 1, OTHER: 1}
    assert driver.unprepare_calls == {UID: 2}
    assert [(each.method, each.uids, each.api) for each in driver.calls] == [
        ("NodePrepareResources", (UID, OTHER), api),
        ("NodeUnprepareResources", (UID,), api),
        ("NodeUnprepareResources", (UID,), api),
    ]
    assert [each.at for each in driver.calls] == sorted(each.at for each in driver.calls)


def test_version_that_is_not_served(root):
    """It serves the versions that it is told to, whatever it announces."""
    with FakeDriver(root / "plugins_registry", serves=["v1beta1"]) as driver:
        with pytest.raises(grpc.RpcError) as caught:
            dra(driver, "Prepare", UID)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert dra(driver, "Prepare", UID, api="v1beta1")[UID].error == ""


def test_failures_are_counted_down(driver):
    """It fails so many calls, and then no more."""
    driver.on_prepare.fail_times = 2
    driver.on_prepare.error = "broken"
    errors = [dra(driver, "Prepare", UID)[UID].error for _ in range(3)]
    assert errors == ["broken", "broken", ""]
    driver.on_unprepare.fail_times = ALWAYS
    assert all(dra(driver, "Unprepare", UID)[UID].error for _ in range(5))
    assert UID in driver.prepared


def test_failure_of_one_claim(driver):
    """It can fail one claim of a call, with the others prepared."""
    driver.on_prepare.fail_times = 1
    driver.on_prepare.fails = [OTHER]
    assert dra(driver, "Prepare", UID)[UID].error == ""
    claims = dra(driver, "Prepare", UID, OTHER)
    assert (claims[UID].error, claims[OTHER].error) == ("", "made to fail")
    assert set(driver.prepared) == {UID}


def test_failure_as_status(driver):
    """It can end the whole call with a status, with or without effect."""
    driver.on_prepare.fail_times = 1
    driver.on_prepare.code = grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.RpcError) as caught:
        dra(driver, "Prepare", UID)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert driver.prepared == {}
    driver.on_prepare.fail_times = 1
    driver.on_prepare.late = True
    with pytest.raises(grpc.RpcError):
        dra(driver, "Prepare", UID)
    assert set(driver.prepared) == {UID}


def test_lies(driver):
    """It can leave claims out, add others, answer nothing, and send devices with an error."""
    driver.on_prepare.omit = [OTHER]
    driver.on_prepare.foreign = ["f"]
    assert set(dra(driver, "Prepare", UID, OTHER)) == {UID, "f"}
    driver.on_prepare.omit = True
    assert set(dra(driver, "Prepare", UID, OTHER)) == {"f"}
    driver.on_prepare.omit = False
    driver.on_prepare.empty = [UID]
    entry = dra(driver, "Prepare", UID)[UID]
    assert (len(entry.devices), entry.error) == (0, "")
    driver.on_prepare.empty = ()
    driver.on_prepare.fail_times = 1
    driver.on_prepare.devices_too = True
    entry = dra(driver, "Prepare", UID)[UID]
    assert (len(entry.devices), entry.error) == (1, "made to fail")


def test_devices_by_table_and_by_function(driver):
    """What a claim gets can be given by UID or computed; an exception is the claim's error."""
    odd = PreparedDevice("", "gpu-1", "s1", ("r",), ("no CDI ID",))
    driver.devices = {UID: [odd]}
    claims = dra(driver, "Prepare", UID, OTHER)
    (device,) = claims[UID].devices
    assert (device.pool_name, device.share_id) == ("", "s1")
    assert list(device.cdi_device_ids) == ["no CDI ID"]
    assert claims[OTHER].devices[0].device_name == "gpu-0"

    def choose(claim):
        if claim.uid == OTHER:
            raise LookupError("no such claim")
        return []

    driver.devices = choose
    claims = dra(driver, "Prepare", UID, OTHER)
    assert (len(claims[UID].devices), claims[UID].error) == (0, "")
    assert claims[OTHER].error == "no such claim"


def test_delay(driver):
    """A delay comes before the effect."""
    driver.on_prepare.delay_s = 0.2
    started = time.monotonic()
    dra(driver, "Prepare", UID)
    assert time.monotonic() - started >= 0.2


def test_hang_until_released(driver):
    """A call that hangs has no effect before it is released, and then the usual one."""
    driver.on_prepare.hang = True
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(dra, driver, "Prepare", UID)
        assert driver.wait_calls()
        assert driver.prepared == {}
        driver.on_prepare.hang = False
        assert future.result(timeout=5)[UID].error == ""
    assert set(driver.prepared) == {UID}


def test_stop_removes_the_sockets(root):
    """An orderly end leaves no socket behind, and nothing hidden either."""
    driver = FakeDriver(root / "plugins_registry").start()
    assert stat.S_ISSOCK(driver.endpoint_path.stat().st_mode)
    driver.stop()
    assert not list((root / "plugins_registry").iterdir())
    assert not list(driver.endpoint_path.parent.iterdir())


def test_death_leaves_the_sockets(driver):
    """A death leaves both files, refuses connections, cuts calls off, and need not be the end."""
    driver.on_prepare.hang = True
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(dra, driver, "Prepare", UID)
        assert driver.wait_calls()
        before = driver.registration_path.stat()
        driver.die()
        with pytest.raises(grpc.RpcError):
            future.result(timeout=5)
    after = driver.registration_path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert is_refused(driver.registration_path)
    assert is_refused(driver.endpoint_path)
    driver.on_prepare.hang = False
    driver.start()
    assert driver.registration_path.stat().st_mtime_ns != before.st_mtime_ns
    assert dra(driver, "Prepare", UID)[UID].error == ""
    assert driver.prepare_calls[UID] == 2
    driver.restart()
    assert dra(driver, "Unprepare", UID)[UID].error == ""


def test_instances_side_by_side(root):
    """Two instances of one driver have sockets of their own."""
    registry = root / "plugins_registry"
    with FakeDriver(registry, instance="a") as a, FakeDriver(registry, instance="b") as b:
        assert (
            len({a.registration_path, b.registration_path, a.endpoint_path, b.endpoint_path}) == 4
        )
        assert get_info(a).endpoint != get_info(b).endpoint
    named = FakeDriver(registry, registration_file="r.sock", endpoint_file="e.sock")
    assert named.registration_path == registry / "r.sock"
    assert named.endpoint_path.name == "e.sock"


def test_cdi_specs(root):
    """With a CDI folder each prepared claim has a spec that resolves its CDI device IDs."""
    cdi = root / "cdi"
    with FakeDriver(root / "plugins_registry", cdi_dir=cdi) as driver:
        (cdi_id,) = dra(driver, "Prepare", UID)[UID].devices[0].cdi_device_ids
        dra(driver, "Prepare", OTHER)
        dra(driver, "Prepare", OTHER)
        (path,) = [each for each in cdi.iterdir() if UID in each.name]
        spec = json.loads(path.read_text())
        assert spec["cdiVersion"] == "0.5.0"
        (entry,) = spec["devices"]
        assert f"{spec['kind']}={entry['name']}" == cdi_id
        assert entry["containerEdits"]["env"] == ["GPU_DEVICE_0=node-a/gpu-0"]
        assert len(list(cdi.iterdir())) == 2
        dra(driver, "Unprepare", UID, OTHER)
        assert not list(cdi.iterdir())


def test_path_that_is_too_long(root):
    """A path that no socket fits in is an error that says so, and nothing is left running."""
    driver = FakeDriver(root / "plugins_registry", instance="x" * 100)
    with pytest.raises(ValueError, match="107"):
        driver.start()
    assert not list((root / "plugins_registry").iterdir())
