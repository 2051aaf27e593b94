"""What the manager asks ResourceClaims of, and how to make one from what users have.

Importing this loads no cluster client.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from drastate.errors import UsageError
from drastate.kube.api_client import find_api_client
from drastate.kube.fields import describe

if TYPE_CHECKING:
    from drastate.model import Claim

_ACCEPTED = (
    "a kubernetes.client.ApiClient (or an API object made from one), the path of a folder of "
    "manifests, or an object with get_claim(namespace, name)"
)


class ClaimSource(Protocol):
    """Where ResourceClaims are read from. Used by several threads at once."""

    def get_claim(self, namespace: str, name: str) -> Claim:
        """Reads one claim as it is now.

        Raises:
            ClaimNotFoundError: there is no claim of that name.
            ClusterForbiddenError: the source refuses to tell.
            ClusterUnavailableError: the source cannot tell now.
            InvalidClaimError: there is one, but it lacks what every claim has.
        """


class NoSource:
    """Stands in where no source was given: every question ends in an error that says so."""

    def get_claim(self, namespace: str, name: str) -> Claim:
        """Never answers.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"ResourceClaim {namespace}/{name} cannot be read, no source of claims was given: "
            f"pass {_ACCEPTED}"
        )


def as_claim_source(obj: object) -> ClaimSource:
    """Makes a source of claims.

    Args:
        obj: a source (given back as it is); an ApiClient of the kubernetes client or an API object
            that has one; the path of a folder of manifests; or None for a source that only raises.

    Raises:
        UsageError: it is none of these, or the folder does not exist.
    """
    if obj is None:
        return NoSource()
    if isinstance(obj, (str, Path)):
        from drastate.kube.manifests import ManifestFolder  # noqa: PLC0415 (loads the YAML parser)

        return ManifestFolder(obj)
    if not inspect.isclass(obj):
        if callable(getattr(obj, "get_claim", None)):
            return cast("ClaimSource", obj)
        if find_api_client(obj) is not None:
            from drastate.kube.client import ClusterClaims  # noqa: PLC0415 (loads the HTTP client)

            return ClusterClaims(obj)
    what = f"the class {obj.__name__}" if inspect.isclass(obj) else describe(obj)
    raise UsageError(f"a source of claims must be {_ACCEPTED}, not {what}")
