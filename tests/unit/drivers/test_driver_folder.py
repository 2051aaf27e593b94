"""What is seen of the registry folder."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from drastate.drivers.folder import RegistryFolder


class SteeredClock:
    """A clock that a test moves."""

    def __init__(self):
        self.ahead_s = 0.0

    def now(self):
        return datetime.now(UTC) + timedelta(seconds=self.ahead_s)

    def monotonic(self):
        return 1000.0 + self.ahead_s

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.is_set()

    def jitter(self, low: float, high: float) -> float:
        return high


@pytest.fixture
def clock():
    return SteeredClock()


@pytest.fixture
def folder(registry, clock):
    return RegistryFolder(registry, clock)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def names(sockets):
    return {Path(each.path).name for each in sockets}


def test_only_sockets_are_seen(registry, folder, caplog):
    """C52: files, dotfiles, sub-folders and links are ignored, with one debug line each at most."""
    caplog.set_level(logging.DEBUG)
    make_socket(registry / "gpu-reg.sock")
    make_socket(registry / ".hidden.sock")
    (registry / "x.txt").write_text("x")
    (registry / "deeper").mkdir()
    make_socket(registry / "deeper" / "reg.sock")
    (registry / "link.sock").symlink_to(registry / "gpu-reg.sock")
    (registry / "dangling.sock").symlink_to("/nowhere")
    for _ in range(3):
        assert names(folder.look()) == {"gpu-reg.sock"}
    assert len(caplog.records) == 5


def test_unchanged_folder_is_not_read_again(registry, folder, clock, monkeypatch):
    """Once the folder has been still for a while a look costs one stat call."""
    make_socket(registry / "gpu-reg.sock")
    clock.ahead_s = 5.0
    assert names(folder.look()) == {"gpu-reg.sock"}
    monkeypatch.setattr(os, "scandir", None)
    assert folder.look() is None


def test_folder_that_changed_recently_is_read_again(registry, folder):
    """C46: a change in the same tick of the folder's mtime is seen all the same."""
    make_socket(registry / "a.sock")
    assert names(folder.look()) == {"a.sock"}
    status = registry.stat()
    make_socket(registry / "b.sock")
    os.utime(registry, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert names(folder.look()) == {"a.sock", "b.sock"}


def test_folder_is_read_every_ten_seconds_anyway(registry, folder, clock):
    """C50: even a change that leaves no trace in the folder's mtime is found."""
    long_ago = 1_000_000_000_000_000_000
    os.utime(registry, ns=(long_ago, long_ago))
    assert folder.look() == frozenset()
    make_socket(registry / "a.sock")
    os.utime(registry, ns=(long_ago, long_ago))
    assert folder.look() is None
    clock.ahead_s += 11
    assert names(folder.look()) == {"a.sock"}


def test_replaced_socket_is_another_one(registry, folder):
    """C46: a socket that is removed and made again on one path has another identity."""
    make_socket(registry / "a.sock")
    before = folder.look()
    (registry / "a.sock").unlink()
    make_socket(registry / "a.sock")
    after = folder.look()
    assert names(before) == names(after)
    assert before != after


def test_folder_that_vanishes_is_empty(registry, folder, caplog):
    """A folder that goes away takes all sockets along, warns once, and may come back."""
    make_socket(registry / "a.sock")
    assert names(folder.look()) == {"a.sock"}
    shutil.rmtree(registry)
    for _ in range(3):
        assert folder.look() == frozenset()
    assert len(caplog.records) == 1
    registry.mkdir()
    make_socket(registry / "b.sock")
    assert names(folder.look()) == {"b.sock"}


def test_unreadable_folder_counts_as_unchanged(registry, folder, monkeypatch, caplog):
    """A folder that cannot be read for the moment does not deregister anybody."""
    make_socket(registry / "a.sock")
    assert names(folder.look()) == {"a.sock"}

    def fail(_):
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        assert folder.look() is None
        assert folder.look() is None
    assert len(caplog.records) == 1
    assert names(folder.look()) == {"a.sock"}
