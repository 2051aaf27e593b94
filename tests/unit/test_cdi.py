"""CDI device IDs: what is valid, who gets which, and what the runtime is handed."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drastate import cdi
from drastate.model import AllocatedDevice, ClaimRef, ClaimUID, DriverName, PreparedDevice

UID = "0f7d2c3e-5a5b-4c1d-9a55-1f7f4b1f0c11"
REF = ClaimRef(ClaimUID(UID), "ns", "c1")
GPU = DriverName("gpu.example.com")


@pytest.fixture(autouse=True)
def _forget_warnings(monkeypatch):
    monkeypatch.setattr(cdi, "_warned", set())


def device(name, *requests, ids=(), share=None):
    return PreparedDevice("node-a", name, share, requests, tuple(ids) or (f"v.com/gpu={name}",))


def allocated(name, request, share=None, driver=GPU):
    return AllocatedDevice(driver, "node-a", name, request, share)


@pytest.mark.parametrize(
    "name",
    [
        "vendor.com/class=dev",
        "v/c=d",
        "v/c=0",
        "a-b_c.d/e.f=1:2.3_4-5",
        "k8s.gpu.nvidia.com/gpu=all",
    ],
)
def test_qualified_names(name):
    """What the CDI specification allows is taken, one-character vendors and classes included."""
    assert cdi.is_qualified(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "=",
        "/=",
        "v/c",
        "v/c=",
        "v=d",
        "/c=d",
        "v/=d",
        "1v/c=d",
        "v/1c=d",
        "v-/c=d",
        "v/c-=d",
        "v/c=-d",
        "v/c=d:",
        "v/c=d=e",
        "v/c/x=d",
        "v/c=d/e",
        "v /c=d",
        "v/c=d\n",
        "é/c=d",
        "v/c=²",
        "v/c=a,b",
    ],
)
def test_unqualified_names(name):
    """C81: what no runtime would find is told from a device name."""
    assert not cdi.is_qualified(name)


@given(st.text())
def test_is_qualified_never_crashes(name):
    """Any text has an answer, and a yes means three parts of ASCII."""
    if cdi.is_qualified(name):
        assert name.isascii()
        kind, _, _ = name.partition("=")
        assert kind.count("/") == 1


@given(st.from_regex(r"[A-Za-z]/[A-Za-z]=[A-Za-z0-9]", fullmatch=True))
def test_shortest_names_are_qualified(name):
    """One character in each part is enough."""
    assert cdi.is_qualified(name)


def test_annotation_key():
    """The key is made of driver and claim UID, with slashes replaced."""
    assert cdi.annotation_key("gpu.example.com", UID) == f"cdi.k8s.io/gpu.example.com_{UID}"
    assert cdi.annotation_key("a/b", "u/1") == "cdi.k8s.io/a_b_u_1"


def test_annotation_key_limits():
    """A name part over 63 characters, or with a character that is not allowed, makes no key."""
    assert cdi.annotation_key("x" * 26, UID) is not None
    assert cdi.annotation_key("x" * 27, UID) is None
    assert cdi.annotation_key("-x", UID) is None
    assert cdi.annotation_key("x", "u-") is None
    assert cdi.annotation_key("x y", UID) is None
    assert cdi.annotation_key("ü", UID) is None
    assert cdi.annotation_key("", "") is None


def test_whole_claim_gets_every_device():
    """The empty request stands for the whole claim."""
    devices = [device("a", "r1"), device("b", "r2"), device("c")]
    assert cdi.devices_for_requests(devices, [""]) == ["v.com/gpu=a", "v.com/gpu=b", "v.com/gpu=c"]


def test_devices_of_one_request():
    """A request gets its own devices and those that belong to all requests, in recorded order."""
    devices = [device("c"), device("a", "r1"), device("b", "r2", "r1")]
    assert cdi.devices_for_requests(devices, {"r2"}) == ["v.com/gpu=c", "v.com/gpu=b"]


def test_no_request_gets_nothing():
    """A container that names nothing of the claim gets none of its devices."""
    assert cdi.devices_for_requests([device("a"), device("b", "r")], []) == []


def test_devices_of_subrequests():
    """A request gets the devices of its subrequest; another subrequest does not."""
    devices = [device("a", "gpu/large")]
    assert cdi.devices_for_requests(devices, ["gpu"]) == ["v.com/gpu=a"]
    assert cdi.devices_for_requests(devices, ["gpu/large"]) == ["v.com/gpu=a"]
    assert cdi.devices_for_requests(devices, ["gpu/small"]) == []
    assert cdi.devices_for_requests(devices, ["gp"]) == []


def test_duplicate_ids_are_merged():
    """C81: the same ID of several devices and requests comes once, and many IDs are no problem."""
    many = [f"v.com/gpu={number}" for number in range(10_000)]
    devices = [device("a", "r", ids=many), device("b", "r", ids=reversed(many))]
    assert cdi.devices_for_requests(devices, ["r", ""]) == many


def test_device_without_ids():
    """C81: a device may have no CDI device ID at all."""
    assert cdi.devices_for_requests([PreparedDevice("p", "d")], [""]) == []


def test_full_request_names_come_back():
    """The subrequest that the driver's helper stripped is taken from the allocation."""
    devices = [device("a", "gpu"), device("b", "net")]
    full = cdi.with_full_request_names(
        devices, [allocated("a", "gpu/large"), allocated("b", "net")], GPU
    )
    assert [each.request_names for each in full] == [("gpu/large",), ("net",)]
    assert cdi.devices_for_requests(full, ["gpu"]) == ["v.com/gpu=a"]
    assert cdi.devices_for_requests(full, ["gpu/small"]) == []


def test_full_request_names_only_for_the_same_device():
    """Another driver's, pool's, device's or share's allocation does not count."""
    devices = [device("a", "gpu", share="s1")]
    other_pool = AllocatedDevice(GPU, "node-b", "a", "gpu/large")
    for other in (
        allocated("a", "gpu/large", driver=DriverName("net.example.com")),
        allocated("b", "gpu/large"),
        allocated("a", "gpu/large", share="s2"),
        other_pool,
    ):
        assert cdi.with_full_request_names(devices, [other], GPU) == tuple(devices)


def test_full_request_names_without_share_id():
    """C16: a v1beta1 driver names no share, so the allocations of all shares count."""
    [full] = cdi.with_full_request_names(
        [device("a", "gpu")],
        [allocated("a", "gpu/large", "s1"), allocated("a", "gpu/xl", "s2")],
        GPU,
    )
    assert full.request_names == ("gpu/large", "gpu/xl")


def test_full_request_names_that_are_there_already():
    """A driver that answers full names, or names no request, is left as it is."""
    devices = [device("a", "gpu", "gpu/large"), device("b", "gpu/large"), device("c")]
    allocation = [allocated(name, "gpu/large") for name in "abc"]
    assert cdi.with_full_request_names(devices, allocation, GPU) == tuple(devices)


def test_container_info():
    """The runtime gets all IDs once, and an annotation for each claim and driver with devices."""
    other = ClaimRef(ClaimUID("u2"), "ns", "c2")
    net = DriverName("net.example.com")
    info = cdi.container_info(
        [
            (REF, GPU, ["v/g=1", "v/g=0"]),
            (other, net, ["v/n=0", "v/g=0"]),
            (REF, GPU, ["v/g=0", "v/g=2"]),
            (other, GPU, []),
        ]
    )
    assert info.cdi_devices == ("v/g=1", "v/g=0", "v/n=0", "v/g=2")
    assert dict(info.annotations) == {
        f"cdi.k8s.io/gpu.example.com_{UID}": "v/g=1,v/g=0,v/g=2",
        "cdi.k8s.io/net.example.com_u2": "v/n=0,v/g=0",
    }


def test_container_info_of_nothing():
    """A container without devices gets empty collections."""
    info = cdi.container_info([])
    assert info.cdi_devices == ()
    assert dict(info.annotations) == {}


def test_long_driver_names_are_warned_about_once(caplog):
    """A driver whose name makes no key keeps its devices, and is logged once."""
    driver = DriverName("a-driver-with-a-long-name.example.com")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            info = cdi.container_info([(REF, driver, ["v/g=0"])])
    assert info.cdi_devices == ("v/g=0",)
    assert dict(info.annotations) == {}
    [record] = caplog.records
    assert (record.driver, record.claim_uid) == (driver, UID)


def test_warnings_need_bounded_memory(caplog):
    """Past some number of drivers nothing more is remembered, and nothing more is logged."""
    for number in range(cdi._WARNED_MAX + 50):
        cdi.container_info([(REF, DriverName(f"{number}-{'x' * 40}"), ["v/g=0"])])
    assert len(cdi._warned) == cdi._WARNED_MAX == len(caplog.records)
