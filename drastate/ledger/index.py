"""The claims that are held or owed, in memory: an image of the file, and of nothing else."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

from drastate.model import ClaimRecord, ClaimUID, PodUID

_K = TypeVar("_K", bound=Hashable)


class ClaimIndex:
    """Look-ups by claim UID, by name and by pod.

    Written by the commit leader alone, after a commit. Read by any thread without a lock: every
    look-up is one dictionary access, and the values never change in place.
    """

    def __init__(self) -> None:
        self._by_uid: dict[ClaimUID, ClaimRecord] = {}
        self._by_name: dict[tuple[str, str], tuple[ClaimUID, ...]] = {}
        self._by_pod: dict[PodUID, tuple[ClaimUID, ...]] = {}

    def find(self, uid: ClaimUID) -> ClaimRecord | None:
        """The record of a claim; None when nothing is held or owed."""
        return self._by_uid.get(uid)

    def named(self, namespace: str, name: str) -> tuple[ClaimRecord, ...]:
        """The records of that name: several when a claim was re-created while the old is held."""
        return self._records(self._by_name.get((namespace, name), ()))

    def of_pod(self, pod_uid: PodUID) -> tuple[ClaimRecord, ...]:
        """The claims that a pod holds, in the order it came to hold them."""
        held = self._records(self._by_pod.get(pod_uid, ()))
        # A commit may have been shown between the two look-ups.
        return tuple(record for record in held if pod_uid in record.pods)

    def holds(self, pod_uid: PodUID) -> bool:
        """Whether the pod holds any claim. One set look-up."""
        return pod_uid in self._by_pod

    def pods(self) -> tuple[PodUID, ...]:
        """Every pod that holds a claim."""
        return tuple(self._by_pod)

    def all(self) -> tuple[ClaimRecord, ...]:
        """Every record."""
        return tuple(self._by_uid.values())

    def publish(self, new: ClaimRecord) -> None:
        """Shows a record that was committed; a settled one leaves memory."""
        uid = new.ref.uid
        name = (new.ref.namespace, new.ref.name)
        old = self._by_uid.get(uid)
        before = old.pods.keys() if old else ()
        after = () if new.is_settled else new.pods.keys()
        if new.is_settled:
            self._by_uid.pop(uid, None)
            _drop(self._by_name, name, uid)
        else:
            self._by_uid[uid] = new
            if old is None:
                self._by_name[name] = (*self._by_name.get(name, ()), uid)
        for pod_uid in after:
            if pod_uid not in before:
                self._by_pod[pod_uid] = (*self._by_pod.get(pod_uid, ()), uid)
        for pod_uid in before:
            if pod_uid not in after:
                _drop(self._by_pod, pod_uid, uid)

    def _records(self, uids: Iterable[ClaimUID]) -> tuple[ClaimRecord, ...]:
        found = (self._by_uid.get(uid) for uid in uids)
        return tuple(record for record in found if record is not None)


def _drop(index: dict[_K, tuple[ClaimUID, ...]], key: _K, uid: ClaimUID) -> None:
    left = tuple(each for each in index.get(key, ()) if each != uid)
    if left:
        index[key] = left
    else:
        index.pop(key, None)
