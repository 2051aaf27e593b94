"""C54 and C55: what a plugin says of itself, checked."""

from __future__ import annotations

import pytest

from drastate.drivers.validation import (
    RegistrationRefusedError,
    check_driver_name,
    check_endpoint,
    check_type,
    check_versions,
    quote,
)


@pytest.mark.parametrize("name", ["gpu.example.com", "a", "0", "a-b.c-d", "x" * 63])
def test_driver_names_that_pass(name):
    """A lower-case DNS subdomain of up to 63 characters is a driver name."""
    assert check_driver_name(name) == name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "empty"),
        ("x" * 300, "300 characters"),
        ("x" * 64, "64 characters"),
        ("../x", "not a DNS subdomain"),
        ("GPU.example.com", "not a DNS subdomain"),
        ("gpu.example.com\n", "not a DNS subdomain"),
        ("gpu\nexample", "not a DNS subdomain"),
        ("-gpu", "not a DNS subdomain"),
        ("gpu-", "not a DNS subdomain"),
        ("gpu..com", "not a DNS subdomain"),
        (".gpu", "not a DNS subdomain"),
        ("gpu/x", "not a DNS subdomain"),
        ("gpü", "not a DNS subdomain"),
        ("gpu_x", "not a DNS subdomain"),
    ],
)
def test_driver_names_that_do_not(name, reason):
    """C54: each bad driver name is refused with its own reason, on one line."""
    with pytest.raises(RegistrationRefusedError, match=reason) as caught:
        check_driver_name(name)
    assert "\n" not in caught.value.reason
    assert len(caught.value.reason) < 400


def test_endpoints_that_pass(root):
    """An absolute path anywhere below the root is an endpoint, up to 107 bytes."""
    for endpoint in (root / "plugins" / "x" / "dra.sock", root / "dra.sock"):
        assert check_endpoint(str(endpoint), root) == str(endpoint)
    longest = f"{root}/{'x' * (106 - len(str(root)))}"
    assert len(longest) == 107
    assert check_endpoint(longest, root) == longest
    assert check_endpoint(f"/{root}//plugins/./dra.sock", root) == f"{root}/plugins/dra.sock"


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("dra.sock", "not an absolute path"),
        ("unix:///run/dra.sock", "not an absolute path"),
        ("@abstract", "not an absolute path"),
        ("/run/other.sock", "not inside"),
        ("{root}", "root folder"),
        ("{root}/", "root folder"),
        ("{root}-other/dra.sock", "not inside"),
        ("{root}/../dra.sock", r'contains "\.\."'),
        ("{root}/x/../dra.sock", r'contains "\.\."'),
        ("{root}/link/dra.sock", "symbolic link"),
        ("{root}/same/dra.sock", None),
        ("{root}/loop/dra.sock", None),
        ("{root}/a\0b", "NUL"),
        ("{root}/{long}", "bytes"),
        ("{root}/{wide}", "bytes"),
    ],
)
def test_endpoints_that_do_not(root, endpoint, reason):
    """C54: each bad endpoint is refused with its own reason; links inside the root are fine."""
    (root / "link").symlink_to("/run")
    (root / "same").symlink_to(root / "plugins")
    (root / "loop").symlink_to(root / "loop")
    endpoint = endpoint.format(root=root, long="x" * (107 - len(str(root))), wide="ä" * 50)
    if reason is None:
        assert check_endpoint(endpoint, root) == endpoint
        return
    with pytest.raises(RegistrationRefusedError, match=reason):
        check_endpoint(endpoint, root)


def test_root_may_be_a_link(root):
    """A root that is reached through a symbolic link itself is the same root."""
    link = root / "kubelet"
    link.symlink_to(root)
    endpoint = str(link / "plugins" / "dra.sock")
    assert check_endpoint(endpoint, link) == endpoint
    with pytest.raises(RegistrationRefusedError, match="not inside"):
        check_endpoint(str(root / "plugins" / "dra.sock"), link)


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        (["v1.DRAPlugin"], "v1.DRAPlugin"),
        (["v1beta1.DRAPlugin"], "v1beta1.DRAPlugin"),
        (["v1.DRAPlugin", "v1beta1.DRAPlugin"], "v1.DRAPlugin"),
        (["v1beta1.DRAPlugin", "v1.DRAPlugin"], "v1.DRAPlugin"),
        (["v1beta1.DRAPlugin"] * 3, "v1beta1.DRAPlugin"),
        (["v7.DRAPlugin", "v1.DRAResourceHealth", "v1.DRAPlugin"], "v1.DRAPlugin"),
        (["1.0.0", "v1beta1.DRAPlugin"], "v1beta1.DRAPlugin"),
    ],
)
def test_newest_version_wins(versions, chosen):
    """C55: the newest version that both know is called, whatever the order of the list."""
    assert check_versions(versions).version == chosen


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ([], "empty"),
        (["1.0.0"], '"1.0.0"'),
        (["v1alpha3.Node", "v1alpha4"], "v1alpha4"),
        (["v1"], "only v1.DRAPlugin and v1beta1.DRAPlugin"),
        (["v1.DRAResourceHealth"], "v1.DRAResourceHealth"),
    ],
)
def test_versions_that_cannot_be_called(versions, reason):
    """C55: old and unknown versions are refused by name."""
    with pytest.raises(RegistrationRefusedError, match=reason):
        check_versions(versions)


def test_other_plugin_types_are_refused_for_good():
    """C53: the refusal names the type that is accepted, and asking again is pointless."""
    check_type("DRAPlugin")
    with pytest.raises(RegistrationRefusedError, match="DRAPlugin") as caught:
        check_type("DevicePlugin")
    assert caught.value.final


def test_foreign_text_is_quoted_safely():
    """A foreign text cannot break a line, and is no longer than a line."""
    assert quote('a"\n\x1b') == '"a\\"\\n\\u001b"'
    assert len(quote("x" * 5000)) < 120
