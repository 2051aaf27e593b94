"""Reads a ResourceClaim, as the API server or a manifest has it, into a `drastate.model.Claim`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drastate.errors import InvalidClaimError
from drastate.kube.fields import Field
from drastate.kube.warn import WarnOnce
from drastate.model import (
    AllocatedDevice,
    Claim,
    ClaimRef,
    ClaimUID,
    Consumer,
    DriverName,
    Operation,
    Owner,
)

if TYPE_CHECKING:
    from drastate.kube.fields import Fail

GROUP = "resource.k8s.io"

#: API versions with allocations of another shape; read leniently they would look like "no devices".
_TOO_OLD = ("v1alpha1", "v1alpha2")

_warnings = WarnOnce(__name__)


def parse_claim(obj: object) -> Claim:
    """Reads a ResourceClaim of resource.k8s.io/v1, v1beta2 or v1beta1.

    Unknown fields are ignored, and only what a node needs is required. A claim without a namespace
    is in "default", as in a manifest.

    Args:
        obj: the JSON object as a mapping; a model object of the cluster client is taken too.

    Returns:
        The claim; its allocation is None while there is none, and empty when it has no devices.

    Raises:
        InvalidClaimError: a field that every ResourceClaim has is missing, or a field has the wrong
            type; the text names it.
    """
    root = Field(obj, "", _fail("(unnamed)", None))
    if obj is None:
        root.fail("nothing was passed")
    _check_kind(root)
    metadata = root.member("metadata")
    name = metadata.need("name")
    namespace = metadata.text("namespace") or "default"
    root = Field(obj, "", _fail(f"{namespace}/{name}", None))
    metadata = root.member("metadata")
    uid = metadata.text("uid")
    if not uid:
        root.fail(
            "metadata.uid is missing: the API server gives every claim a UID; in a hand-written "
            "manifest, set it to a new one (the output of uuidgen, in quotes)"
        )
    root = Field(obj, "", _fail(f"{namespace}/{name}", uid))
    status = root.member("status")
    return Claim(
        ref=ClaimRef(ClaimUID(uid), namespace, name),
        owner=_owner(root.member("metadata")),
        reserved_for=tuple(_consumer(each) for each in status.items("reservedFor")),
        allocation=_allocation(status.member("allocation"), uid),
    )


def _fail(claim: str, uid: str | None) -> Fail:
    def fail(message: str) -> InvalidClaimError:
        return InvalidClaimError(f"ResourceClaim {claim}: {message}", claim=claim, claim_uid=uid)

    return fail


def _check_kind(root: Field) -> None:
    kind = root.text("kind")
    if kind not in (None, "", "ResourceClaim"):
        root.fail(f"this is a {kind}, not a ResourceClaim")
    group, slash, version = (root.text("apiVersion") or "").partition("/")
    if not group:
        return
    if group != GROUP or not slash:
        root.fail(f"apiVersion must be {GROUP}/v1, not {root.text('apiVersion')}")
    if version in _TOO_OLD:
        root.fail(f"apiVersion {GROUP}/{version} is too old; {GROUP}/v1beta1 and later can be read")


def _owner(metadata: Field) -> Owner | None:
    for each in metadata.items("ownerReferences"):
        if each.flag("controller"):
            return Owner(
                api_version=each.text("apiVersion") or "",
                kind=each.text("kind") or "",
                name=each.text("name") or "",
                uid=each.text("uid") or "",
            )
    return None


def _consumer(entry: Field) -> Consumer:
    return Consumer(
        api_group=entry.text("apiGroup") or "",
        resource=entry.text("resource") or "",
        name=entry.text("name") or "",
        uid=entry.text("uid") or "",
    )


def _allocation(allocation: Field, claim_uid: str) -> tuple[AllocatedDevice, ...] | None:
    if allocation.value is None:
        return None
    results = allocation.member("devices").items("results")
    return tuple(_device(each, claim_uid) for each in results)


def _device(result: Field, claim_uid: str) -> AllocatedDevice:
    return AllocatedDevice(
        driver=DriverName(result.need("driver")),
        pool=result.need("pool"),
        device=result.need("device"),
        request=result.text("request") or "",
        share_id=result.text("shareID") or None,
        admin_access=result.flag("adminAccess"),
        skip=_skip(result, claim_uid),
    )


def _skip(result: Field, claim_uid: str) -> frozenset[Operation]:
    found: set[Operation] = set()
    for entry in result.items("skipNodeOperations"):
        word = entry.as_text()
        if word == "*":
            found.update(Operation)
        elif word in set(Operation):
            found.add(Operation(word))
        else:
            _warnings.warn(
                "Unknown entry in skipNodeOperations ignored",
                claim_uid=claim_uid,
                driver=result.text("driver") or "",
                entry=f"{word}",
            )
    return frozenset(found)
