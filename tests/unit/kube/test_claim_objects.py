"""ResourceClaims of every API version, read into model values."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drastate.errors import InvalidClaimError
from drastate.kube import claim as claim_module
from drastate.kube.objects import parse_claim
from drastate.model import AllocatedDevice, Claim, ClaimRef, Consumer, Operation, Owner


def make_claim(status=None, version="v1", **metadata):
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceClaim",
        "metadata": {"name": "c1", "namespace": "ns", "uid": "u1", **metadata},
        "spec": {"devices": {"requests": [{"name": "gpu", "anything": 5}]}},
        "status": status,
    }


def result(**fields):
    return {
        "driver": "gpu.example.com",
        "pool": "node-a",
        "device": "gpu-0",
        "request": "gpu",
        **fields,
    }


def allocation(*results):
    return {"allocation": {"devices": {"results": list(results)}, "nodeSelector": {}}}


def message_of(raw):
    with pytest.raises(InvalidClaimError) as caught:
        parse_claim(raw)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1", "v1alpha3"])
def test_allocated_claim(version):
    """What a node needs reads the same in every version of the API."""
    status = {
        **allocation(
            result(),
            result(device="gpu-1", request="net/fast", shareID="s1", adminAccess=True),
        ),
        "reservedFor": [{"resource": "pods", "name": "p1", "uid": "p-uid"}],
    }
    owners = [
        {"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "x"},
        {"apiVersion": "v1", "kind": "Pod", "name": "p1", "uid": "p-uid", "controller": True},
    ]
    claim = parse_claim(make_claim(status, version, ownerReferences=owners))
    assert claim == Claim(
        ref=ClaimRef("u1", "ns", "c1"),
        owner=Owner("v1", "Pod", "p1", "p-uid"),
        reserved_for=(Consumer("", "pods", "p1", "p-uid"),),
        allocation=(
            AllocatedDevice("gpu.example.com", "node-a", "gpu-0", "gpu"),
            AllocatedDevice(
                "gpu.example.com", "node-a", "gpu-1", "net/fast", share_id="s1", admin_access=True
            ),
        ),
    )


@pytest.mark.parametrize("status", [None, {}, {"allocation": None}, {"reservedFor": None}])
def test_not_allocated(status):
    """C24: a claim without allocation or reservation is readable; others say what that means."""
    claim = parse_claim(make_claim(status))
    assert claim.allocation is None
    assert claim.reserved_for == ()


@pytest.mark.parametrize("inner", [{}, {"devices": None}, {"devices": {"results": []}}])
def test_allocated_without_devices(inner):
    """An allocation without devices is an allocation."""
    assert parse_claim(make_claim({"allocation": inner})).allocation == ()


def test_reserved_for_many_of_any_kind():
    """C19: 256 consumers, of kinds unknown here, are all read."""
    consumers = [
        {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": f"g{n}", "uid": f"{n}"}
        for n in range(255)
    ]
    claim = parse_claim(make_claim({"reservedFor": [*consumers, {"resource": "things"}]}))
    assert len(claim.reserved_for) == 256
    assert claim.reserved_for[3] == Consumer("scheduling.k8s.io", "podgroups", "g3", "3")
    assert claim.reserved_for[255] == Consumer("", "things", "", "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (None, set()),
        ([], set()),
        (["*"], set(Operation)),
        (["NodePrepareResources", "NodeUnprepareResources"], set(Operation)),
        (["NodeUnprepareResources"], {Operation.UNPREPARE}),
    ],
)
def test_skip_node_operations(words, expected):
    """C20: the operations that need no call are read for each result, "*" as both."""
    [device] = parse_claim(make_claim(allocation(result(skipNodeOperations=words)))).allocation
    assert device.skip == expected


def test_unknown_skip_node_operations(monkeypatch, caplog):
    """C20: an unknown operation is ignored, and warned about once."""
    monkeypatch.setattr(claim_module, "_warnings", type(claim_module._warnings)("drastate"))
    raw = make_claim(allocation(result(skipNodeOperations=["NodeFly", "NodePrepareResources"])))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            [device] = parse_claim(raw).allocation
    assert device.skip == {Operation.PREPARE}
    [record] = caplog.records
    assert (record.entry, record.claim_uid) == ("NodeFly", "u1")


def test_two_shares_of_one_device():
    """C16: the same device allocated twice is told apart by its share ID."""
    claim = parse_claim(make_claim(allocation(result(shareID="s1"), result(shareID="s2"))))
    assert [device.share_id for device in claim.allocation] == ["s1", "s2"]


def test_claim_of_a_manifest():
    """A manifest may leave out namespace, kind and version."""
    claim = parse_claim({"metadata": {"name": "c", "uid": "u"}})
    assert claim.ref == ClaimRef("u", "default", "c")


def test_missing_uid():
    """A claim without UID says how to make one."""
    raw = make_claim(uid=None)
    assert "ResourceClaim ns/c1: metadata.uid is missing" in message_of(raw)
    assert "uuidgen" in message_of(raw)


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (None, "nothing was passed"),
        (5, "must be a mapping, not the number 5"),
        ({}, "metadata.name is missing"),
        (make_claim(name=""), "metadata.name is missing"),
        (make_claim(uid=5), "metadata.uid must be text, not the number 5: put it in quotes"),
        ({**make_claim(), "kind": "Pod"}, "this is a Pod, not a ResourceClaim"),
        ({**make_claim(), "apiVersion": "v1"}, "apiVersion must be resource.k8s.io/v1, not v1"),
        (make_claim(version="v1alpha2"), "too old"),
        (make_claim({"allocation": []}), "status.allocation must be a mapping"),
        (make_claim(allocation(5)), "status.allocation.devices.results[0] must be a mapping"),
        (make_claim(allocation(result(driver=""))), "results[0].driver is missing"),
        (make_claim(allocation(result(), result(pool=None))), "results[1].pool is missing"),
        (make_claim(allocation(result(device=7))), "results[0].device must be text"),
        (make_claim(allocation(result(adminAccess="yes"))), "adminAccess must be true or false"),
        (
            make_claim(allocation(result(skipNodeOperations="*"))),
            "skipNodeOperations must be a list",
        ),
        (make_claim(ownerReferences={}), "metadata.ownerReferences must be a list"),
        (make_claim({"reservedFor": [{"uid": []}]}), "status.reservedFor[0].uid must be text"),
        (make_claim(allocation(result(share_id="s1"))), "share_id should be"),
    ],
)
def test_wrong_fields_are_named_by_path(raw, part):
    """A field that is missing or has the wrong type is named by its path."""
    assert part in message_of(raw)


def test_error_knows_the_claim():
    """The error carries name and UID as far as they are known."""
    with pytest.raises(InvalidClaimError) as caught:
        parse_claim(make_claim(allocation(5)))
    assert (caught.value.claim, caught.value.claim_uid) == ("ns/c1", "u1")
    assert not caught.value.can_retry


FIELDS = st.sampled_from(
    [
        "metadata",
        "name",
        "namespace",
        "uid",
        "kind",
        "apiVersion",
        "status",
        "allocation",
        "devices",
        "results",
        "driver",
        "pool",
        "device",
        "request",
        "shareID",
        "adminAccess",
        "skipNodeOperations",
        "reservedFor",
        "apiGroup",
        "resource",
        "ownerReferences",
        "controller",
        "share_id",
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    LEAVES | st.just("a"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=6),
    max_leaves=30,
)


def check_text(error):
    assert error.message
    assert "\n" not in error.message


@given(JSON)
def test_any_json_is_a_claim_or_an_error(value):
    """Whatever comes, it is a claim or an InvalidClaimError."""
    try:
        parse_claim(value)
    except InvalidClaimError as exc:
        check_text(exc)


@given(status=JSON, owners=JSON)
def test_any_status(status, owners):
    """Whatever the status holds, it is read or named."""
    try:
        assert parse_claim(make_claim(status, ownerReferences=owners)).ref.uid == "u1"
    except InvalidClaimError as exc:
        check_text(exc)
