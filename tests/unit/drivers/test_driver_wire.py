"""The messages and names on the wire."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from drastate.drivers import wire
from drastate.drivers._pb import dra_v1, dra_v1beta1, pluginregistration_v1
from drastate.drivers._pb.pool import message
from drastate.model import Operation


def test_wire_names():
    """The full service names are the kubelet's."""
    v1, v1beta1 = wire.APIS
    assert v1.path(Operation.PREPARE) == (
        "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
    )
    assert v1beta1.path(Operation.UNPREPARE) == (
        "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources"
    )


@pytest.mark.parametrize("messages", [dra_v1, dra_v1beta1])
def test_field_numbers_of_the_calls(messages):
    """Every field of the DRA messages has its number, checked against bytes written by hand."""
    claim = messages.Claim(namespace="n", uid="u", name="c")
    claim_bytes = b"\x0a\x01n\x12\x01u\x1a\x01c"
    assert claim.SerializeToString() == claim_bytes
    for name in ("NodePrepareResourcesRequest", "NodeUnprepareResourcesRequest"):
        request = getattr(messages, name)(claims=[claim])
        assert request.SerializeToString() == b"\x0a\x09" + claim_bytes
    device = messages.Device(
        request_names=["r"], pool_name="p", device_name="d", cdi_device_ids=["i"]
    )
    device_bytes = b"\x0a\x01r\x12\x01p\x1a\x01d\x22\x01i"
    assert device.SerializeToString() == device_bytes
    response = messages.NodePrepareResourcesResponse()
    response.claims["u"].devices.add().CopyFrom(device)
    response.claims["u"].error = "e"
    entry = b"\x0a\x0c" + device_bytes + b"\x12\x01e"
    assert response.SerializeToString() == b"\x0a\x16\x0a\x01u\x12\x11" + entry
    unprepared = messages.NodeUnprepareResourcesResponse()
    unprepared.claims["u"].error = "e"
    assert unprepared.SerializeToString() == b"\x0a\x08\x0a\x01u\x12\x03\x0a\x01e"


def test_share_id_is_v1_alone():
    """Field 5 of a device is its share ID in v1, and unknown in v1beta1."""
    assert dra_v1.Device(share_id="s").SerializeToString() == b"\x2a\x01s"
    assert not dra_v1.Device().HasField("share_id")
    assert "share_id" not in dra_v1beta1.Device.DESCRIPTOR.fields_by_name


def test_field_numbers_of_the_registration():
    """Every field of the registration messages has its number."""
    info = pluginregistration_v1.PluginInfo(
        type="t", name="n", endpoint="e", supported_versions=["v"]
    )
    assert info.SerializeToString() == b"\x0a\x01t\x12\x01n\x1a\x01e\x22\x01v"
    status = pluginregistration_v1.RegistrationStatus(plugin_registered=True, error="e")
    assert status.SerializeToString() == b"\x08\x01\x12\x01e"
    assert pluginregistration_v1.InfoRequest().SerializeToString() == b""


def test_unknown_message_is_an_error():
    """A name that is in no proto file of ours is a KeyError."""
    with pytest.raises(KeyError):
        message("k8s.io.kubelet.pkg.apis.dra.v1.Nothing")


HOST = """
from google.protobuf import descriptor_pb2, descriptor_pool
for package, message in (
    ("pluginregistration", "PluginInfo"),
    ("k8s.io.kubelet.pkg.apis.dra.v1", "Claim"),
):
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package}/api.proto" if package != "pluginregistration" else "api.proto",
        package=package, syntax="proto3")
    file.message_type.add(name=message).field.add(
        name="other", number=1, label=1, type=9, json_name="other")
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
    descriptor_pool.Default().FindMessageTypeByName(f"{package}.{message}")
"""
OURS = """
from drastate.drivers import DriverClient
from drastate.drivers._pb import dra_v1, pluginregistration_v1
assert dra_v1.Claim(uid="u").uid == "u"
assert pluginregistration_v1.PluginInfo(type="t").type == "t"
"""


@pytest.mark.parametrize("program", [HOST + OURS, OURS + HOST], ids=["host-first", "ours-first"])
def test_host_program_may_carry_the_same_protos(program):
    """C66: the kubelet's messages in the process-wide pool and ours do not meet, in any order."""
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)
