"""What an answer comes to; without any driver."""

from __future__ import annotations

import pytest

from drastate.drivers import answers
from drastate.drivers._pb import dra_v1, dra_v1beta1
from drastate.errors import DriverProtocolError, DriverRefusedError
from drastate.model import DriverName, PreparedDevice

G = DriverName("gpu.example.com")
ENDPOINT = "/run/dra.sock"
FOREIGN = "ffffffff-ffff-4fff-8fff-ffffffffffff"


def read_prepare(response, *claims):
    return answers.read_prepare(response, claims, driver=G, endpoint=ENDPOINT)


def read_unprepare(response, *claims):
    return answers.read_unprepare(response, claims, driver=G, endpoint=ENDPOINT)


def prepared(entries):
    response = dra_v1.NodePrepareResourcesResponse()
    for uid, (devices, error) in entries.items():
        response.claims[uid].devices.extend(devices)
        response.claims[uid].error = error
    return response


def device(**fields):
    return dra_v1.Device(**{"pool_name": "node-a", "device_name": "gpu-0", **fields})


def test_good_answer_becomes_devices(c1):
    """Every field of a device arrives, in the driver's order."""
    first = device(
        request_names=["gpu"], cdi_device_ids=["gpu.example.com/gpu=gpu-0"], share_id="s1"
    )
    answer = read_prepare(prepared({c1.uid: ([first, device(device_name="gpu-1")], "")}), c1)
    assert answer.results[c1.uid].error is None
    assert answer.results[c1.uid].devices == (
        PreparedDevice("node-a", "gpu-0", "s1", ("gpu",), ("gpu.example.com/gpu=gpu-0",)),
        PreparedDevice("node-a", "gpu-1"),
    )


def test_v1beta1_has_no_share_id(c1):
    """An answer in v1beta1 is read like one in v1, without share IDs."""
    response = dra_v1beta1.NodePrepareResourcesResponse()
    response.claims[c1.uid].devices.add(pool_name="node-a", device_name="gpu-0")
    answer = read_prepare(response, c1)
    assert answer.results[c1.uid].devices == (PreparedDevice("node-a", "gpu-0"),)


def test_empty_share_id_is_one(c1):
    """A share ID that is set but empty is not the same as none."""
    answer = read_prepare(prepared({c1.uid: ([device(share_id="")], "")}), c1)
    assert answer.results[c1.uid].devices[0].share_id == ""


@pytest.mark.parametrize("read", [read_prepare, read_unprepare])
def test_omitted_claim_fails_alone(read, c1, c2):
    """C83: a claim that the driver left out fails, the others do not."""
    if read is read_prepare:
        response = prepared({c2.uid: ([], "")})
    else:
        response = dra_v1.NodeUnprepareResourcesResponse()
        response.claims[c2.uid].error = ""
    results = read(response, c1, c2).results
    error = results[c1.uid].error
    assert isinstance(error, DriverProtocolError)
    assert "left the claim out" in str(error)
    assert (error.driver, error.endpoint, error.claim, error.claim_uid) == (
        G,
        ENDPOINT,
        "default/c1",
        c1.uid,
    )
    assert results[c2.uid].error is None
    assert list(response.claims) == [c2.uid]


@pytest.mark.parametrize("read", [read_prepare, read_unprepare])
def test_foreign_uid_is_reported_and_ignored(read, c1):
    """C83: a claim that nobody asked about has no result, and is named."""
    if read is read_prepare:
        response = prepared({c1.uid: ([], ""), FOREIGN: ([], "boom")})
    else:
        response = dra_v1.NodeUnprepareResourcesResponse()
        response.claims[c1.uid].error = ""
        response.claims[FOREIGN].error = "boom"
    answer = read(response, c1)
    assert answer.foreign == (FOREIGN,)
    assert list(answer.results) == [c1.uid]
    assert answer.results[c1.uid].error is None


def test_entry_without_content_is_success(c1):
    """C83: a null entry is a success with nothing to inject."""
    wire = b"\n\x26\n\x24" + c1.uid.encode()  # a map entry that has a key and no value
    for response, read in (
        (dra_v1.NodePrepareResourcesResponse.FromString(wire), read_prepare),
        (dra_v1.NodeUnprepareResourcesResponse.FromString(wire), read_unprepare),
    ):
        result = read(response, c1).results[c1.uid]
        assert (result.error, result.devices, result.called, result.answered) == (
            None,
            (),
            True,
            True,
        )


def test_devices_beside_an_error_are_ignored(c1):
    """C83: an error counts, whatever comes with it."""
    result = read_prepare(prepared({c1.uid: ([device()], "no such device")}), c1).results[c1.uid]
    assert isinstance(result.error, DriverRefusedError)
    assert "no such device" in str(result.error)
    assert "default/c1" in str(result.error)
    assert result.error.code is None
    assert result.devices == ()


@pytest.mark.parametrize("missing", ["pool_name", "device_name"])
def test_device_without_a_name_is_refused(missing, c1, c2):
    """C83: a device without pool or device name fails its claim, not the others."""
    response = prepared({c1.uid: ([device(), device(**{missing: ""})], ""), c2.uid: ([], "")})
    results = read_prepare(response, c1, c2).results
    assert isinstance(results[c1.uid].error, DriverProtocolError)
    assert "lacks its pool or device name" in str(results[c1.uid].error)
    assert results[c1.uid].devices == ()
    assert results[c2.uid].error is None


@pytest.mark.parametrize("name", ["gpu-0", "vendor/gpu", "vendor=gpu", "", "a b/c=d", "x/y=z\n"])
def test_malformed_cdi_id_is_named(name, c1):
    """C81: what is not vendor/class=name fails the claim, and the text names it."""
    response = prepared({c1.uid: ([device(cdi_device_ids=["a/b=c", name])], "")})
    error = read_prepare(response, c1).results[c1.uid].error
    assert isinstance(error, DriverProtocolError)
    assert f'"{name}"'.replace("\n", "\\n") in str(error)


def test_many_cdi_ids_and_duplicates_pass(c1):
    """C81: no CDI IDs, ten thousand of them and the same one twice are all fine."""
    many = tuple(f"gpu.example.com/gpu=gpu-{number}" for number in range(10_000))
    devices = [device(), device(cdi_device_ids=many), device(cdi_device_ids=many[:1] * 2)]
    result = read_prepare(prepared({c1.uid: (devices, "")}), c1).results[c1.uid]
    assert result.error is None
    assert [each.cdi_device_ids for each in result.devices] == [(), many, many[:1] * 2]


def test_long_error_text_is_cut(c1):
    """C83: a megabyte of error text does not reach the ledger or the log."""
    result = read_prepare(prepared({c1.uid: ([], "x" * 1_000_000)}), c1).results[c1.uid]
    assert 1024 < len(str(result.error)) < 1300
