"""The folder of manifests as the last look saw it: one look serves pods, claims and liveness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drastate.kube.manifests import ManifestFolder, ManifestScan
from drastate.model import Claim, Pod, PodSnapshot, PodUID


@dataclass(frozen=True, slots=True)
class FolderView:
    """One look.

    Attributes:
        scan: what was found, with its problems.
        pods: the pods by UID.
        claims: the claims by (namespace, name).
    """

    scan: ManifestScan
    pods: Mapping[PodUID, Pod]
    claims: Mapping[tuple[str, str], Claim]

    def drivers_of(self, pod: Pod) -> frozenset[str]:
        """The drivers that the pod's claims need, as far as the folder tells."""
        names = [entry.claim_name for entry in pod.claims] + [pod.extended_claim]
        claims = [self.claims.get((pod.namespace, name)) for name in names if name is not None]
        return frozenset(
            device.driver
            for claim in claims
            if claim is not None
            for device in claim.allocation or ()
        )


class WatchedFolder:
    """A folder of manifests that is looked at now and then; a `ClaimSource` in between."""

    def __init__(self, path: Path) -> None:
        """Looks for the first time.

        Raises:
            UsageError: there is no such folder.
        """
        self._folder = ManifestFolder(path)
        self.view = _view(self._folder.scan())

    def look(self) -> FolderView:
        """Looks again; the same view as before when nothing has changed."""
        scan = self._folder.scan()
        if scan is not self.view.scan:
            self.view = _view(scan)
        return self.view

    def get_claim(self, namespace: str, name: str) -> Claim:
        """A claim as the last look saw it; asked of the folder itself when it was not there.

        Raises:
            ClaimNotFoundError: the folder does not hold it.
            ClusterUnavailableError: the folder cannot be read, or several files hold the claim.
        """
        claim = self.view.claims.get((namespace, name))
        if claim is not None:
            return claim
        return self._folder.get_claim(namespace, name)

    def active_pods(self) -> PodSnapshot:
        """The live pods for the reconcile loop: those in the folder now."""
        view = self.look()
        return PodSnapshot(view.pods.keys(), complete=view.scan.complete)


def _view(scan: ManifestScan) -> FolderView:
    return FolderView(
        scan,
        {each.pod.uid: each.pod for each in scan.pods},
        {(each.claim.ref.namespace, each.claim.ref.name): each.claim for each in scan.claims},
    )
