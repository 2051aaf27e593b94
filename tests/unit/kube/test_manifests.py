"""A folder of manifests that people, editors and copying tools write to."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from drastate.errors import (
    ClaimNotFoundError,
    ClusterUnavailableError,
    InvalidManifestError,
    UsageError,
)
from drastate.kube import manifests
from drastate.kube.manifests import ManifestFolder, StaticClaims, load_file
from drastate.kube.objects import parse_claim


class LateClock:
    """A clock that runs an hour ahead, so that every file is old."""

    def now(self):
        return datetime.now(UTC) + timedelta(hours=1)


def pod_text(name, uid=None):
    return f"apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, uid: uid-{uid or name}}}\n"


def claim_text(name, uid=None, namespace="default"):
    return (
        "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\n"
        f"metadata: {{name: {name}, namespace: {namespace}, uid: uid-{uid or name}}}\n"
    )


def names_of(scan):
    return [str(found.pod) for found in scan.pods] + [str(found.claim.ref) for found in scan.claims]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "manifests"
    path.mkdir()
    return path


@pytest.fixture
def reads(monkeypatch):
    """Counts how often each file is read."""
    counts = {}

    def read(path):
        counts[path.name] = counts.get(path.name, 0) + 1
        return original(path)

    original = manifests.read_manifest
    monkeypatch.setattr(manifests, "read_manifest", read)
    return counts


# --- what is found --------------------------------------------------------------------------------


def test_scan(folder):
    """Pods and claims of all manifest files are found, by file name; all else is left out."""
    (folder / "b.yaml").write_text(f"{pod_text('p2')}---\n{claim_text('c1')}")
    (folder / "a.yml").write_text(f"{pod_text('p1')}---\nkind: Service\nmetadata: 5\n")
    (folder / "c.json").write_text(
        '{"kind": "ResourceClaim", "metadata": {"name": "c2", "uid": "u"}}'
    )
    for other in (".hidden.yaml", "x.yaml~", "#x.yaml#", "x.yaml.swp", "x.txt", ".#b.yaml"):
        (folder / other).write_text("{{{")
    (folder / "sub.yaml").mkdir()
    scan = ManifestFolder(folder).scan()
    assert (scan.problems, scan.complete) == ((), True)
    assert names_of(scan) == ["default/p1", "default/p2", "default/c1", "default/c2"]
    assert [found.path for found in scan.pods] == [folder / "a.yml", folder / "b.yaml"]


def test_lists(folder):
    """Lists are opened, also nested ones and those whose items have no kind."""
    pod = {"metadata": {"name": "p1", "uid": "u1"}}
    claim = {"kind": "ResourceClaim", "metadata": {"name": "c1", "uid": "u2"}}
    inner = {"kind": "PodList", "items": [pod]}
    (folder / "a.json").write_text(
        json.dumps({"kind": "List", "items": [claim, inner, {"kind": "Node"}]})
    )
    scan = ManifestFolder(str(folder)).scan()
    assert names_of(scan) == ["default/p1", "default/c1"]
    assert scan.complete


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [", "line 2: "),
        ("a: 1\n", "line 1: the document has no kind"),
        ("- 1\n", "line 1: the document must be a mapping, not a list"),
        ("kind: 5\n", "line 1: the document has no kind"),
        ("kind: List\nitems: [5]\n", "line 1: items[0] must be a mapping"),
        ("kind: List\nitems: x\n", "line 1: items must be a list"),
        ("kind: List\nitems: [{}]\n", "line 1: items[0] has no kind"),
        (
            "# x\n---\nkind: Pod\nmetadata: {name: p}\n",
            "line 3: pod default/p: metadata.uid is missing",
        ),
        (
            "kind: Pod\nmetadata: {name: p, uid: 12345678}\n",
            "the number 12345678: put it in quotes",
        ),
        ("kind: Pod\napiVersion: v2\nmetadata: {name: p, uid: u}\n", "apiVersion must be v1"),
        ("kind: ResourceClaim\nmetadata: {name: c}\n", "ResourceClaim default/c: metadata.uid"),
        ("kind: Pod\nkind: Pod\n", "line 2: key 'kind' is there twice"),
        ("", "empty: still being written?"),
        (" \n", "empty: still being written?"),
    ],
)
def test_broken_files_hide_nothing_else(folder, text, part):
    """C113: a broken file or object is a problem that names it, and all the others are there."""
    (folder / "a.yaml").write_text(pod_text("p1"))
    (folder / "broken.yaml").write_text(text)
    (folder / "c.yaml").write_text(claim_text("c1"))
    scan = ManifestFolder(folder).scan()
    assert names_of(scan) == ["default/p1", "default/c1"]
    assert not scan.complete
    [problem] = scan.problems
    assert problem.path == str(folder / "broken.yaml")
    assert str(problem).startswith(problem.path)
    assert part in str(problem)


def test_broken_document_in_a_good_file(folder):
    """C113: the other documents of a file with a broken one are there."""
    text = f"{pod_text('p1')}---\nkind: Pod\n---\n{pod_text('p2')}---\na: {{\n---\n{pod_text('p3')}"
    (folder / "a.yaml").write_text(text)
    scan = ManifestFolder(folder).scan()
    assert names_of(scan) == ["default/p1", "default/p2", "default/p3"]
    assert len(scan.problems) == 2
    assert not scan.complete


def test_files_that_cannot_be_read(folder, tmp_path):
    """C113: binary, huge and special files, and links to nowhere, are problems; nothing hangs."""
    (folder / "a.yaml").write_bytes(b"\xff\xfe")
    os.mkfifo(folder / "b.yaml")
    (folder / "c.yaml").symlink_to(tmp_path / "nowhere")
    with (folder / "d.yaml").open("wb") as file:
        file.truncate(8 * 1024 * 1024 + 1)
    (folder / "e.yaml").symlink_to(folder / "e.yaml")
    scan = ManifestFolder(folder).scan()
    texts = [problem.message for problem in scan.problems]
    parts = [
        "line 1: not UTF-8",
        "not a regular file",
        "a link that leads nowhere",
        "larger than 8 MiB",
        "Too many levels of symbolic links",
    ]
    assert len(texts) == len(parts)
    for text, part in zip(texts, parts, strict=True):
        assert part in text
    assert not scan.complete


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission(folder):
    """C113: a file that may not be read is a problem."""
    path = folder / "a.yaml"
    path.write_text(pod_text("p1"))
    path.chmod(0)
    scan = ManifestFolder(folder).scan()
    assert "Permission denied" in scan.problems[0].message
    assert not scan.complete


def test_links_are_followed(folder, tmp_path):
    """A file that is a link, as in a mounted ConfigMap, is read through it."""
    (folder / "..data").mkdir()
    (folder / "..data" / "a.yaml").write_text(pod_text("p1"))
    (folder / "a.yaml").symlink_to("..data/a.yaml")
    assert names_of(ManifestFolder(folder).scan()) == ["default/p1"]


def test_byte_order_mark(folder):
    """A file from an editor that writes a byte order mark is read."""
    (folder / "a.yaml").write_text(pod_text("p1"), encoding="utf-8-sig")
    assert names_of(ManifestFolder(folder).scan()) == ["default/p1"]


def test_same_pod_uid_twice(folder):
    """Two pods with the same UID are a problem that names both files."""
    (folder / "a.yaml").write_text(pod_text("p1", "same"))
    (folder / "b.yaml").write_text(pod_text("p2", "same"))
    scan = ManifestFolder(folder).scan()
    assert names_of(scan) == ["default/p1"]
    [problem] = scan.problems
    assert "a.yaml" in str(problem)
    assert "b.yaml" in str(problem)
    assert not scan.complete


@pytest.mark.parametrize("second", [claim_text("c1", "u2"), claim_text("c2", "c1")])
def test_same_claim_twice(folder, second):
    """Two claims with the same name or UID are a problem, and neither is handed out."""
    (folder / "a.yaml").write_text(claim_text("c1"))
    (folder / "b.yaml").write_text(second)
    source = ManifestFolder(folder)
    scan = source.scan()
    assert names_of(scan) == ["default/c1"]
    assert "b.yaml" in str(scan.problems[0])
    assert not scan.complete
    with pytest.raises(ClusterUnavailableError, match=r"a\.yaml.*b\.yaml"):
        source.get_claim("default", "c1")


# --- the folder itself ----------------------------------------------------------------------------


def test_folder_must_exist(tmp_path):
    """A folder that does not exist, or is a file, is the caller's mistake."""
    with pytest.raises(UsageError, match="No such file"):
        ManifestFolder(tmp_path / "no")
    (tmp_path / "file.yaml").touch()
    with pytest.raises(UsageError, match="is not a folder"):
        ManifestFolder(tmp_path / "file.yaml")


def test_vanished_folder(folder):
    """C113: a folder that is gone is a problem, not an empty folder."""
    source = ManifestFolder(folder)
    folder.rmdir()
    scan = source.scan()
    assert (scan.pods, scan.complete) == ((), False)
    assert "No such file" in str(scan.problems[0])
    with pytest.raises(ClusterUnavailableError, match="cannot look for ResourceClaim default/c1"):
        source.get_claim("default", "c1")


def test_emptied_folder(folder):
    """A folder whose files were all deleted is empty, and that is complete."""
    (folder / "a.yaml").write_text(pod_text("p1"))
    source = ManifestFolder(folder)
    source.scan()
    (folder / "a.yaml").unlink()
    assert source.scan() == manifests.ManifestScan(complete=True)


def test_other_folder_that_is_empty(folder, tmp_path):
    """C113: an empty folder in place of the known one looks like an unmounted volume."""
    (folder / "a.yaml").write_text(pod_text("p1"))
    source = ManifestFolder(folder)
    folder.rename(tmp_path / "away")
    folder.mkdir()
    scan = source.scan()
    assert not scan.complete
    assert "not mounted" in str(scan.problems[0])
    (folder / "b.yaml").write_text(pod_text("p2"))
    assert source.scan().complete
    (folder / "b.yaml").unlink()
    assert source.scan().complete


def test_volume_mounted_after_the_start(folder, tmp_path):
    """C113: the folder that once had files is the one whose emptiness is believed."""
    source = ManifestFolder(folder)
    folder.rename(tmp_path / "below")
    folder.mkdir()
    (folder / "a.yaml").write_text(pod_text("p1"))
    assert source.scan().complete
    shutil.rmtree(folder)
    (tmp_path / "below").rename(folder)
    assert not source.scan().complete


# --- files that change ----------------------------------------------------------------------------


def test_unchanged_files_are_read_once(folder, reads):
    """Only files whose stamp changed are read again."""
    for name in "abc":
        (folder / f"{name}.yaml").write_text(pod_text(name))
    source = ManifestFolder(folder, clock=LateClock())
    first = source.scan()
    assert source.scan() == first
    assert reads == {"a.yaml": 1, "b.yaml": 1, "c.yaml": 1}
    (folder / "b.yaml").write_text(pod_text("other"))
    (folder / "c.yaml").unlink()
    assert names_of(source.scan()) == ["default/a", "default/other"]
    assert reads == {"a.yaml": 1, "b.yaml": 2, "c.yaml": 1}


def test_same_size_and_time_but_another_file(folder, reads):
    """A file that a tool moved into place with the old time and size is read again."""
    path = folder / "a.yaml"
    path.write_text(pod_text("p1"))
    source = ManifestFolder(folder, clock=LateClock())
    source.scan()
    status = path.stat()
    new = folder / "new"
    new.write_text(pod_text("p2"))
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.rename(path)
    assert names_of(source.scan()) == ["default/p2"]


def test_young_files_are_always_read(folder, reads):
    """A file that changed less than two seconds ago can change again without showing it."""
    (folder / "a.yaml").write_text(pod_text("p1"))
    source = ManifestFolder(folder)
    for _ in range(3):
        source.scan()
    assert reads == {"a.yaml": 3}


def test_file_that_changes_while_it_is_read(folder, monkeypatch):
    """A file that changes during the read is read once more, then it is a problem."""
    from drastate.kube import files

    path = folder / "a.yaml"
    path.write_text(pod_text("p1"))
    original = files.os.fstat
    changes = []

    def fstat(descriptor):
        if changes:
            with path.open("a") as file:
                file.write(changes.pop())
        return original(descriptor)

    monkeypatch.setattr(files.os, "fstat", fstat)
    source = ManifestFolder(folder)
    changes[:] = ["# 1\n"]
    assert names_of(source.scan()) == ["default/p1"]
    changes[:] = ["# 1\n"] * 10
    scan = source.scan()
    assert "changes while it is read" in str(scan.problems[0])
    assert not scan.complete


def test_file_that_vanishes_during_the_scan(folder, monkeypatch):
    """A file that is renamed between the listing and the read is found under its new name."""
    (folder / "a.yaml").write_text(pod_text("p1"))
    original = manifests.read_manifest

    def read(path):
        if path.name == "a.yaml" and path.exists():
            path.rename(folder / "b.yaml")
        return original(path)

    monkeypatch.setattr(manifests, "read_manifest", read)
    scan = ManifestFolder(folder).scan()
    assert names_of(scan) == ["default/p1"]
    assert scan.complete


def test_folder_that_never_stands_still(folder, monkeypatch):
    """A folder that changes at every look is not complete, and the scan ends all the same."""
    (folder / "a.yaml").write_text(pod_text("p1"))
    original = manifests.os.listdir

    def listdir(path):
        names = original(path)
        (folder / f"{time.monotonic_ns()}.yaml").touch()
        return names

    monkeypatch.setattr(manifests.os, "listdir", listdir)
    scan = ManifestFolder(folder).scan()
    assert "changes faster" in str(scan.problems[0])
    assert not scan.complete


def test_files_replaced_under_load(folder):
    """No complete scan ever misses a pod whose file is replaced or renamed all the time."""
    for number in range(20):
        (folder / f"keep-{number}.yaml").write_text(pod_text(f"keep-{number}"))
    (folder / "x.yaml").write_text(pod_text("moving"))
    stop = threading.Event()

    def move():
        names = ["x.yaml", "0.yaml", "zz.yaml"]
        while not stop.is_set():
            (folder / names[0]).rename(folder / names[1])
            names.append(names.pop(0))
            time.sleep(0.001)

    thread = threading.Thread(target=move)
    thread.start()
    try:
        source = ManifestFolder(folder)
        scans = [source.scan() for _ in range(100)]
    finally:
        stop.set()
        thread.join()
    missed = [scan for scan in scans if scan.complete and len(scan.pods) != 21]
    assert missed == []
    assert any(scan.complete for scan in scans)


def test_large_folder_is_cheap_to_scan_again(folder):
    """A second scan of 1000 unchanged files costs little more than looking at them."""
    for number in range(1000):
        (folder / f"{number}.yaml").write_text(pod_text(f"p{number}"))
    source = ManifestFolder(folder, clock=LateClock())
    source.scan()
    start = time.perf_counter()
    assert len(source.scan().pods) == 1000
    assert time.perf_counter() - start < 0.5


# --- claims ---------------------------------------------------------------------------------------


def test_get_claim(folder):
    """A claim is read fresh from the folder, by namespace and name."""
    source = ManifestFolder(folder)
    (folder / "a.yaml").write_text(claim_text("c1"))
    (folder / "b.yaml").write_text(claim_text("c1", "other", namespace="team"))
    assert source.get_claim("team", "c1").ref.uid == "uid-other"
    (folder / "b.yaml").write_text(claim_text("c1", "newer", namespace="team"))
    assert source.get_claim("team", "c1").ref.uid == "uid-newer"


def test_claim_that_is_not_there(folder):
    """C12: a missing claim names the folder, the remedy, and the files that may hold it."""
    source = ManifestFolder(folder)
    with pytest.raises(ClaimNotFoundError) as caught:
        source.get_claim("default", "c1")
    assert str(folder) in str(caught.value)
    assert "put a manifest of it there" in str(caught.value)
    assert "cannot be read" not in str(caught.value)
    for name in "abcde":
        (folder / f"{name}.yaml").write_text("a: {")
    with pytest.raises(
        ClaimNotFoundError, match=r"may be in what cannot be read: .*a\.yaml.*2 more"
    ):
        source.get_claim("default", "c1")


def test_static_claims():
    """Claims in hand are a source, too."""
    claim = parse_claim({"metadata": {"name": "c1", "uid": "u1"}})
    source = StaticClaims([claim])
    assert source.get_claim("default", "c1") is claim
    with pytest.raises(ClaimNotFoundError, match="ns/c1"):
        source.get_claim("ns", "c1")
    with pytest.raises(UsageError, match="default/c1"):
        StaticClaims([claim, claim])


# --- one file -------------------------------------------------------------------------------------


def test_load_file(folder):
    """A file with pods and claims is read whole."""
    path = folder / "a.yaml"
    path.write_text(f"{pod_text('p1')}---\n{claim_text('c1')}")
    scan = load_file(path)
    assert names_of(scan) == ["default/p1", "default/c1"]
    assert scan.complete
    assert load_file(str(path)) == scan


@pytest.mark.parametrize(
    "text", ["a: {", "", "kind: Pod\n", f"{pod_text('a')}---\n{pod_text('a')}"]
)
def test_load_file_with_a_problem(folder, text):
    """The first problem of a single file is raised."""
    path = folder / "a.yaml"
    path.write_text(text)
    with pytest.raises(InvalidManifestError) as caught:
        load_file(path)
    assert caught.value.path == str(path)
    with pytest.raises(InvalidManifestError, match="no such file"):
        load_file(folder / "no.yaml")
