"""What users may pass as a source of claims."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kubernetes import client as k8s

from drastate.errors import UsageError
from drastate.kube.client import ClusterClaims
from drastate.kube.manifests import ManifestFolder, StaticClaims
from drastate.kube.source import as_claim_source
from drastate.kube.warn import WarnOnce


def test_source_is_given_back():
    """An object with get_claim is a source already."""
    source = StaticClaims([])
    assert as_claim_source(source) is source


def test_folder(tmp_path):
    """A path, as text or Path, is a folder of manifests."""
    for path in (tmp_path, str(tmp_path)):
        source = as_claim_source(path)
        assert isinstance(source, ManifestFolder)
        assert source.path == tmp_path
    with pytest.raises(UsageError, match="No such file"):
        as_claim_source(tmp_path / "no")


def test_api_client():
    """An ApiClient, or an API object with one, is an API server."""
    with k8s.ApiClient() as api:
        assert isinstance(as_claim_source(api), ClusterClaims)
        assert isinstance(as_claim_source(k8s.CoreV1Api(api)), ClusterClaims)


def test_no_source():
    """Without a source each question is an error that says what to pass."""
    with pytest.raises(UsageError, match=r"ns/c1 cannot be read.*ApiClient"):
        as_claim_source(None).get_claim("ns", "c1")


@pytest.mark.parametrize("obj", [5, {}, object(), StaticClaims, k8s.ApiClient, b"/tmp"])
def test_what_is_no_source(obj):
    """Anything else is refused with what would be right."""
    with pytest.raises(UsageError, match="a source of claims must be"):
        as_claim_source(obj)


def test_asyncio_clients_are_refused():
    """A client for asyncio cannot be called from threads."""

    class Async:
        async def call_api(self):
            pass

    with pytest.raises(UsageError, match="asyncio"):
        as_claim_source(Async())


def test_importing_the_source_loads_no_client(tmp_path):
    """The cluster client's cost is paid by those who use a cluster."""
    code = (
        "import sys; from drastate.kube.source import as_claim_source; "
        f"as_claim_source(None); as_claim_source({str(tmp_path)!r}); "
        "assert not {'kubernetes', 'urllib3', 'grpc'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_warnings_are_bounded(caplog, monkeypatch):
    """A warning comes once, until so many others came that it was forgotten."""
    from drastate.kube import warn

    monkeypatch.setattr(warn, "_SEEN_MAX", 3)
    warnings = WarnOnce("drastate")
    for entry in ["a", "a", "b", "a", "c", "d", "a"]:
        warnings.warn("Something is odd", entry=entry)
    assert [record.entry for record in caplog.records] == ["a", "b", "c", "d", "a"]
    assert len(warnings._seen) <= 3
