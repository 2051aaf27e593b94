"""Device files: whole or not at all, private, and never of another boot."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from drastate.agent.device_files import DeviceFiles
from drastate.errors import InvalidPodError, LedgerUnwritableError
from drastate.model import ContainerInfo, Pod, PodUID

INFO = {"main": ContainerInfo(("a.b/c=d",), {"cdi.k8s.io/x": "a.b/c=d"})}


def pod(uid: str) -> Pod:
    return Pod(PodUID(uid), "default", "p")


def test_what_is_written(tmp_path: Path) -> None:
    """A file tells the pod, the boot, and each container's devices; only its owner reads it."""
    files = DeviceFiles(tmp_path / "pods", "boot-7")
    files.write(pod("u1"), INFO)
    path = tmp_path / "pods" / "u1.json"
    assert json.loads(path.read_text()) == {
        "pod": {"uid": "u1", "namespace": "default", "name": "p"},
        "boot_id": "boot-7",
        "containers": [
            {
                "name": "main",
                "cdi_devices": ["a.b/c=d"],
                "annotations": {"cdi.k8s.io/x": "a.b/c=d"},
            }
        ],
    }
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "pods").stat().st_mode & 0o777 == 0o700
    assert files.pods() == {"u1"}


def test_removing(tmp_path: Path) -> None:
    """Removing a file that is not there is fine."""
    files = DeviceFiles(tmp_path, "b")
    files.write(pod("u1"), INFO)
    files.remove(PodUID("u1"))
    files.remove(PodUID("u1"))
    assert files.pods() == set()


@pytest.mark.parametrize("boot_id", ["another", None])
def test_files_of_another_boot_go(tmp_path: Path, boot_id: str | None) -> None:
    """C36: after a reboot (or in an unknown boot) nobody is told of the devices before it."""
    DeviceFiles(tmp_path, "b").write(pod("u1"), INFO)
    assert DeviceFiles(tmp_path, boot_id).pods() == set()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_crash_go(tmp_path: Path) -> None:
    """A partial or damaged file is removed at the next start; a good one stays."""
    DeviceFiles(tmp_path, "b").write(pod("u1"), INFO)
    (tmp_path / ".u2.json.partial").write_text('{"boot_id": "b"')
    (tmp_path / "u3.json").write_text("{")
    assert DeviceFiles(tmp_path, "b").pods() == {"u1"}
    assert [path.name for path in tmp_path.iterdir()] == ["u1.json"]


@pytest.mark.parametrize("uid", ["../../x", "..", "a/b", "ä", "x.json", "%2F"])
def test_a_uid_names_a_file_in_the_folder_alone(tmp_path: Path, uid: str) -> None:
    """Whatever a manifest says as UID, the file stays in the folder and is found again."""
    files = DeviceFiles(tmp_path / "pods", "b")
    files.write(pod(uid), INFO)
    assert files.pods() == {uid}
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "pods"]
    files.remove(PodUID(uid))
    assert files.pods() == set()


def test_a_uid_that_is_too_long(tmp_path: Path) -> None:
    """It is refused by name, before anything is written."""
    with pytest.raises(InvalidPodError, match="too long"):
        DeviceFiles(tmp_path, "b").write(pod("x" * 300), INFO)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    """A full disk leaves what was there, and an error that names the folder."""
    files = DeviceFiles(tmp_path, "b")
    files.write(pod("u1"), INFO)
    before = (tmp_path / "u1.json").read_text()

    def fails(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(LedgerUnwritableError, match="No space left"):
        files.write(pod("u1"), {})
    assert (tmp_path / "u1.json").read_text() == before
    assert len(list(tmp_path.iterdir())) == 1
