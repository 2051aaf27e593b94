"""Pods and ResourceClaims from a folder of manifests: the source where there is no cluster.

A folder is written by people, editors and copying tools while it is read here. So nothing is
believed to be gone because it could not be read: `ManifestScan.complete` is False then.
"""

from __future__ import annotations

import operator
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drastate.clock import SystemClock
from drastate.errors import (
    ClaimNotFoundError,
    ClusterUnavailableError,
    InvalidManifestError,
    UsageError,
)
from drastate.kube.files import Stamp
from drastate.kube.manifest_file import ClaimManifest, ManifestFile, PodManifest, read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from drastate.clock import Clock
    from drastate.model import Claim

__all__ = [
    "ClaimManifest",
    "ManifestFolder",
    "ManifestScan",
    "PodManifest",
    "StaticClaims",
    "load_file",
]

_SUFFIXES = (".yaml", ".yml", ".json")

#: Age at which a file can be trusted to have another stamp when it changes again. 2 s is the
#: coarsest time stamp of any file system in use (FAT).
_SETTLED_S = 2.0

#: How often a folder is looked at again when it changes meanwhile. Arbitrary; one look takes about
#: a microsecond for each file.
_LOOKS_MAX = 5

#: How many unreadable files an error text names.
_NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class ManifestScan:
    """What a folder (or a file) of manifests holds.

    Attributes:
        pods: by file name, then in the order of the file; of two with the same UID, the first.
        claims: likewise; of two with the same name or UID, the first.
        problems: what could not be read or does not fit together. It hides nothing else.
        complete: nothing is missing here that is in the folder. Only then does the absence of a pod
            say that it is gone.
    """

    pods: tuple[PodManifest, ...] = ()
    claims: tuple[ClaimManifest, ...] = ()
    problems: tuple[InvalidManifestError, ...] = ()
    complete: bool = False


def load_file(path: str | Path) -> ManifestScan:
    """Reads one file of manifests.

    Args:
        path: a YAML or JSON file with pods and ResourceClaims; other kinds are left out.

    Returns:
        What it holds, complete and without problems.

    Raises:
        InvalidManifestError: the file cannot be read, or something in it; the first problem is
            raised.
    """
    path = Path(path)
    try:
        found = read_manifest(path)
    except FileNotFoundError as exc:
        raise InvalidManifestError(f"{path}: there is no such file", path=str(path)) from exc
    scan = _scan_of([found], [])
    if scan.problems:
        raise scan.problems[0]
    return scan


class StaticClaims:
    """A source of claims over claims in hand.

    Args:
        claims: no two with the same namespace and name.

    Raises:
        UsageError: two claims have the same namespace and name.
    """

    def __init__(self, claims: Iterable[Claim]) -> None:
        self._claims: dict[tuple[str, str], Claim] = {}
        for claim in claims:
            key = (claim.ref.namespace, claim.ref.name)
            if key in self._claims:
                raise UsageError(f"two ResourceClaims are named {claim.ref}")
            self._claims[key] = claim

    def get_claim(self, namespace: str, name: str) -> Claim:
        """Looks a claim up.

        Raises:
            ClaimNotFoundError: there is none of that name.
        """
        claim = self._claims.get((namespace, name))
        if claim is None:
            raise ClaimNotFoundError(
                f"no ResourceClaim {namespace}/{name} among the {len(self._claims)} that were given"
            )
        return claim


class ManifestFolder:
    """Pods and ResourceClaims in the files of one folder.

    Read are the files that end in .yaml, .yml or .json. Subfolders, hidden files and other names
    are left out. Safe for use by several threads.

    Args:
        path: the folder.
        clock: tells how old a file is.

    Raises:
        UsageError: it does not exist or is no folder.
    """

    def __init__(self, path: str | Path, *, clock: Clock | None = None) -> None:
        self._path = Path(path)
        self._clock: Clock = clock or SystemClock()
        try:
            status = os.stat(self._path)  # noqa: PTH116 (the same call as in _names)
        except OSError as exc:
            reason = exc.strerror or type(exc).__name__
            raise UsageError(f"folder of manifests {self._path}: {reason}") from exc
        if not stat.S_ISDIR(status.st_mode):
            raise UsageError(
                f"{self._path} is not a folder; to use one file, pass "
                "StaticClaims(found.claim for found in load_file(path).claims)"
            )
        self._identity = (status.st_dev, status.st_ino)
        # Both are replaced whole by each scan and never changed in place, so threads need no lock.
        self._cache: dict[str, _Cached] = {}
        self._last: tuple[list[ManifestFile], ManifestScan] | None = None

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    def __repr__(self) -> str:
        return f"ManifestFolder({str(self._path)!r})"

    def scan(self) -> ManifestScan:
        """Reads the folder; files that did not change since the last scan are not read again.

        Returns:
            What is in it; the same object as the last time when nothing has changed. Trouble of any
            kind is told in the result, never raised.
        """
        files, problems = self._read()
        last = self._last
        if last is not None and not problems and _same(last[0], files):
            return last[1]
        found = _scan_of(files, problems)
        self._last = None if problems else (files, found)
        return found

    def get_claim(self, namespace: str, name: str) -> Claim:
        """Looks a claim up in the folder as it is now.

        Raises:
            ClaimNotFoundError: no file that can be read holds it; files that cannot be read are
                named.
            ClusterUnavailableError: the folder cannot be read, or several files hold the claim.
        """
        files, problems = self._read()
        if problems:
            raise ClusterUnavailableError(
                f"cannot look for ResourceClaim {namespace}/{name}: {problems[0].message}"
            ) from problems[0]
        claims = [found for file in files for found in file.claims]
        matches = [
            found
            for found in claims
            if (found.claim.ref.namespace, found.claim.ref.name) == (namespace, name)
        ]
        if not matches:
            broken = [problem for file in files for problem in file.problems]
            raise ClaimNotFoundError(self._not_found(namespace, name, broken))
        claim = matches[0].claim
        twins = [
            found
            for found in claims
            if found.claim.ref.uid == claim.ref.uid and found is not matches[0]
        ]
        clashes = [*matches[1:], *twins]
        if clashes:
            raise ClusterUnavailableError(_clash_of_claims(matches[0], clashes[0]))
        return claim

    def _not_found(self, namespace: str, name: str, broken: Sequence[InvalidManifestError]) -> str:
        text = (
            f"no ResourceClaim {namespace}/{name} in {self._path}: put a manifest of it there, "
            "with its status.allocation"
        )
        if broken:
            named = "; ".join(problem.message for problem in broken[:_NAMED_MAX])
            more = f"; and {len(broken) - _NAMED_MAX} more" if len(broken) > _NAMED_MAX else ""
            text += f" (it may be in what cannot be read: {named}{more})"
        return text

    # --- reading the folder ---------------------------------------------------------------------

    def _read(self) -> tuple[list[ManifestFile], list[InvalidManifestError]]:
        """All files by name, and what is wrong with the folder itself."""
        try:
            for _ in range(_LOOKS_MAX):
                names, identity = self._names()
                files = self._files(names) if names is not None else None
                if files is not None:
                    return files, self._suspicions(files, identity)
        except OSError as exc:
            reason = exc.strerror or type(exc).__name__
            problem = self._problem(f"the folder of manifests cannot be read: {reason}")
            problem.__cause__ = exc
            return [], [problem]
        return [], [self._problem("the folder changes faster than it can be read")]

    def _problem(self, reason: str) -> InvalidManifestError:
        return InvalidManifestError(f"{self._path}: {reason}", path=str(self._path))

    def _names(self) -> tuple[list[str] | None, tuple[int, int]]:
        """The names of the manifest files in order; None when the folder changed during the look.

        A file that is being renamed can be missed under both names, which would look like its end.
        """
        before = os.stat(self._path)  # noqa: PTH116 (hot, and Path.stat only wraps it)
        names = os.listdir(self._path)  # noqa: PTH208 (likewise)
        after = os.stat(self._path)  # noqa: PTH116
        identity = (after.st_dev, after.st_ino)
        if Stamp.of(before) != Stamp.of(after) or set(os.listdir(self._path)) != set(names):  # noqa: PTH208
            return None, identity
        wanted = [name for name in names if name.endswith(_SUFFIXES) and name[0] != "."]
        return sorted(wanted), identity

    def _files(self, names: Iterable[str]) -> list[ManifestFile] | None:
        """The files of these names; None when one of them is gone meanwhile."""
        known = self._cache
        cache: dict[str, _Cached] = {}
        files: list[ManifestFile] = []
        folder = f"{self._path}/"
        for name in names:
            try:
                status = os.stat(folder + name)  # noqa: PTH116 (hot: a Path costs more than a stat)
                if stat.S_ISDIR(status.st_mode):
                    continue
                cached = known.get(name)
                if cached is None or not cached.is_valid(Stamp.of(status)):
                    cached = self._read_file(self._path / name)
            except FileNotFoundError:
                path = self._path / name
                if not path.is_symlink():
                    return None
                problem = InvalidManifestError(f"{path}: a link that leads nowhere", path=str(path))
                files.append(ManifestFile(problems=(problem,)))
                continue
            except OSError as exc:
                path = self._path / name
                reason = exc.strerror or type(exc).__name__
                problem = InvalidManifestError(f"{path}: cannot be read: {reason}", path=str(path))
                files.append(ManifestFile(problems=(problem,)))
                continue
            cache[name] = cached
            files.append(cached.file)
        self._cache = cache
        return files

    def _read_file(self, path: Path) -> _Cached:
        now_s = self._clock.now().timestamp()
        file = read_manifest(path)
        stamp = file.stamp
        if stamp is None:
            return _Cached(file, is_settled=False)
        changed_s = max(stamp.modified_ns, stamp.changed_ns) / 1e9
        return _Cached(file, is_settled=now_s - changed_s >= _SETTLED_S)

    def _suspicions(
        self, files: Sequence[ManifestFile], identity: tuple[int, int]
    ) -> list[InvalidManifestError]:
        if files:
            self._identity = identity
            return []
        if identity == self._identity:
            return []
        return [
            self._problem(
                "the folder is another one than before, and empty: is a volume not mounted? If it "
                "shall be empty, restart the program that reads it"
            )
        ]


@dataclass(frozen=True, slots=True)
class _Cached:
    """A file as it was read.

    Attributes:
        file: what it holds.
        is_settled: it was old enough when it was read, so a later change shows in the stamp.
    """

    file: ManifestFile
    is_settled: bool

    def is_valid(self, stamp: Stamp) -> bool:
        return self.is_settled and self.file.stamp == stamp


# --- putting files together -----------------------------------------------------------------------


def _same(old: list[ManifestFile], new: list[ManifestFile]) -> bool:
    """Whether the very same files were read: a file that changed is another object."""
    return len(old) == len(new) and all(map(operator.is_, old, new))


def _scan_of(
    files: Iterable[ManifestFile], folder_problems: Sequence[InvalidManifestError]
) -> ManifestScan:
    problems = list(folder_problems)
    pods: dict[str, PodManifest] = {}
    claims: list[ClaimManifest] = []
    by_name: dict[tuple[str, str], ClaimManifest] = {}
    by_uid: dict[str, ClaimManifest] = {}
    for file in files:
        problems.extend(file.problems)
        for found in file.pods:
            first = pods.setdefault(found.pod.uid, found)
            if first is not found:
                problems.append(_problem_in(found.path, _clash_of_pods(first, found)))
        for each in file.claims:
            ref = each.claim.ref
            other = by_name.get((ref.namespace, ref.name)) or by_uid.get(ref.uid)
            if other is not None:
                problems.append(_problem_in(each.path, _clash_of_claims(other, each)))
                continue
            by_name[ref.namespace, ref.name] = by_uid[ref.uid] = each
            claims.append(each)
    return ManifestScan(tuple(pods.values()), tuple(claims), tuple(problems), not problems)


def _problem_in(path: Path, message: str) -> InvalidManifestError:
    return InvalidManifestError(message, path=str(path))


def _clash_of_pods(first: PodManifest, second: PodManifest) -> str:
    return (
        f"pod {first.pod} in {first.path} and pod {second.pod} in {second.path} have the same UID "
        f"{first.pod.uid}: give each pod its own (the output of uuidgen)"
    )


def _clash_of_claims(first: ClaimManifest, second: ClaimManifest) -> str:
    one, two = first.claim.ref, second.claim.ref
    if (one.namespace, one.name) == (two.namespace, two.name):
        return f"ResourceClaim {one} is in {first.path} and in {second.path}: remove one of them"
    return (
        f"ResourceClaim {one} in {first.path} and ResourceClaim {two} in {second.path} have the "
        f"same UID {one.uid}: give each claim its own (the output of uuidgen)"
    )
