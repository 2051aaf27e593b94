"""The pods and ResourceClaims of one manifest file, and what is wrong in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drastate.errors import DrastateError, InvalidManifestError
from drastate.kube.claim import parse_claim
from drastate.kube.fields import describe
from drastate.kube.files import read_text
from drastate.kube.pod import parse_pod
from drastate.kube.text import read_documents

if TYPE_CHECKING:
    from pathlib import Path

    from drastate.kube.files import Stamp
    from drastate.model import Claim, Pod

_LISTS = {"List": None, "PodList": "Pod", "ResourceClaimList": "ResourceClaim"}


@dataclass(frozen=True, slots=True)
class PodManifest:
    """A pod and the file it was read from."""

    pod: Pod
    path: Path


@dataclass(frozen=True, slots=True)
class ClaimManifest:
    """A ResourceClaim and the file it was read from."""

    claim: Claim
    path: Path


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """What one file holds.

    Attributes:
        pods: in the file's order.
        claims: in the file's order.
        problems: each object or document that could not be read.
        stamp: the state of the file that was read; None when it could not be read at all.
    """

    pods: tuple[PodManifest, ...] = ()
    claims: tuple[ClaimManifest, ...] = ()
    problems: tuple[InvalidManifestError, ...] = ()
    stamp: Stamp | None = None


def read_manifest(path: Path) -> ManifestFile:
    """Reads one file of manifests; other kinds than Pod, ResourceClaim and lists are left out.

    Raises:
        FileNotFoundError: there is no such file (any more). Every other trouble is in `problems`.
    """
    try:
        text, stamp = read_text(path)
    except FileNotFoundError:
        raise
    except OSError as exc:
        problem = InvalidManifestError(
            f"{path}: cannot be read: {exc.strerror or type(exc).__name__}", path=str(path)
        )
        problem.__cause__ = exc
        return ManifestFile(problems=(problem,))
    except InvalidManifestError as exc:
        return ManifestFile(problems=(exc,))
    return _Reader(path).read(text, stamp)


class _Reader:
    """Collects what is found in one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pods: list[PodManifest] = []
        self._claims: list[ClaimManifest] = []
        self._problems: list[InvalidManifestError] = []

    def read(self, text: str, stamp: Stamp) -> ManifestFile:
        if not text.strip():
            # Taken for "no objects", a file that somebody is about to fill would end its pods.
            self._report(None, "empty: still being written? To remove its objects, delete the file")
        documents, problems = read_documents(text)
        for problem in problems:
            self._report(problem.line, problem.reason)
        for document in documents:
            self._take_document(document.value, document.line)
        return ManifestFile(tuple(self._pods), tuple(self._claims), tuple(self._problems), stamp)

    def _report(self, line: int | None, reason: str, cause: DrastateError | None = None) -> None:
        where = f"{self._path}" if line is None else f"{self._path}, line {line}"
        problem = InvalidManifestError(f"{where}: {reason}", path=str(self._path))
        problem.__cause__ = cause
        self._problems.append(problem)

    def _take_document(self, value: object, line: int) -> None:
        # A stack, not recursion: lists may hold lists.
        stack: list[tuple[object, str | None, str]] = [(value, None, "the document")]
        while stack:
            each, default_kind, what = stack.pop()
            if not isinstance(each, Mapping):
                self._report(line, f"{what} must be a mapping, not {describe(each)}")
                continue
            kind = each.get("kind", default_kind)
            if not isinstance(kind, str):
                self._report(line, f"{what} has no kind")
            elif kind in _LISTS:
                items = each.get("items") or []
                if isinstance(items, list):
                    found = [
                        (item, _LISTS[kind], f"items[{index}]") for index, item in enumerate(items)
                    ]
                    stack.extend(reversed(found))
                else:
                    self._report(line, f"items must be a list, not {describe(items)}")
            else:
                self._take_object(each, kind, line)

    def _take_object(self, value: Mapping[object, object], kind: str, line: int) -> None:
        try:
            if kind == "Pod":
                self._pods.append(PodManifest(parse_pod(value), self._path))
            elif kind == "ResourceClaim":
                self._claims.append(ClaimManifest(parse_claim(value), self._path))
        except DrastateError as exc:
            self._report(line, exc.message, exc)
