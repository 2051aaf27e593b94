"""Which claims a pod may use: the kubelet's rules, as pure functions.

Source: kubelet ``cm/dra/manager.go`` (validation pass of 1.34+) and ``resourceclaim.IsForPod``.
"""

from __future__ import annotations

from collections.abc import Iterator

from drastate.errors import (
    ClaimError,
    ClaimNotCreatedError,
    NotAllocatedError,
    NotOwnedError,
    NotReservedError,
)
from drastate.model import Claim, Container, Pod, PodClaim


def wanted_claims(pod: Pod) -> tuple[PodClaim, ...]:
    """The pod's claims in spec order, then the one the scheduler made for its extended resources.

    A pod claim whose status says that it needs no ResourceClaim is left out. So is none that no
    container names: network drivers rely on pod-level claims (kubelet 1.31+).
    """
    extended = (
        (PodClaim(name="", claim_name=pod.extended_claim),)
        if pod.extended_claim is not None
        else ()
    )
    claims = (*pod.claims, *extended)
    return tuple(claim for claim in claims if claim.claim_name or claim.unresolved)


def check_resolved(pod: Pod, pod_claim: PodClaim) -> str:
    """The name of the pod claim's ResourceClaim.

    Raises:
        ClaimNotCreatedError: the pod's status does not tell it (yet).
    """
    if pod_claim.unresolved is not None or pod_claim.claim_name is None:
        why = pod_claim.unresolved or "it names no ResourceClaim"
        raise ClaimNotCreatedError(
            f"pod {pod}, claim {pod_claim.name} of spec.resourceClaims: {why}",
            claim=f"{pod.namespace}/?",
            pod_uid=pod.uid,
        )
    return pod_claim.claim_name


def check_usable(pod: Pod, pod_claim: PodClaim, claim: Claim, *, pod_groups: bool) -> None:
    """Refuses a claim that this pod must not, or cannot yet, use.

    Args:
        pod: the pod.
        pod_claim: its entry that names the claim.
        claim: the claim as its source has it now.
        pod_groups: whether the pod's PodGroup counts as the pod (KEP 5729).

    Raises:
        NotOwnedError: made from a template, for another pod.
        NotReservedError: the pod is not among those it is reserved for.
        NotAllocatedError: no devices were chosen for it yet.
    """
    group = pod.pod_group if pod_groups else None
    error = (_ownership(pod, claim, group) if pod_claim.from_template else None) or _reservation(
        pod, claim, group
    )
    if error is not None:
        raise error
    if claim.allocation is None:
        raise NotAllocatedError(
            f"ResourceClaim {claim.ref} is not allocated: the scheduler (or who is in its place)"
            " has to write status.allocation first",
            claim=str(claim.ref),
            claim_uid=claim.ref.uid,
            pod_uid=pod.uid,
        )


def _ownership(pod: Pod, claim: Claim, group: str | None) -> ClaimError | None:
    owner = claim.owner
    if owner is not None:
        if owner.uid == pod.uid:
            return None
        # The UID of a PodGroup is not compared: the kubelet does not know it. Source: KEP 5729.
        if (
            group is not None
            and owner.kind == "PodGroup"
            and owner.api_version.startswith("scheduling.k8s.io/")
            and owner.name == group
        ):
            return None
    belongs = f"{owner.kind} {owner.name} ({owner.uid})" if owner else "nobody"
    return NotOwnedError(
        f"ResourceClaim {claim.ref} ({claim.ref.uid}) was made from a template for {belongs}, not"
        f" for pod {pod} ({pod.uid}); it is left from an earlier pod of that name: delete the claim"
        " so that a new one is made",
        claim=str(claim.ref),
        claim_uid=claim.ref.uid,
        pod_uid=pod.uid,
    )


def _reservation(pod: Pod, claim: Claim, group: str | None) -> ClaimError | None:
    for consumer in claim.reserved_for:
        if consumer.uid == pod.uid:
            return None
        if (
            group is not None
            and consumer.api_group == "scheduling.k8s.io"
            and consumer.resource == "podgroups"
            and consumer.name == group
        ):
            return None
    holders = ", ".join(
        f"{consumer.resource} {consumer.name}" for consumer in claim.reserved_for[:3]
    )
    more = len(claim.reserved_for) - 3
    reserved = (holders + (f" and {more} more" if more > 0 else "")) if holders else "nobody"
    return NotReservedError(
        f"ResourceClaim {claim.ref} ({claim.ref.uid}) is not reserved for pod {pod} ({pod.uid}) but"
        f" for {reserved}; the scheduler reserves it by adding the pod to status.reservedFor",
        claim=str(claim.ref),
        claim_uid=claim.ref.uid,
        pod_uid=pod.uid,
    )


# --- what containers name -------------------------------------------------------------------------


def requests_of(pod: Pod, container: Container) -> dict[str, set[str]]:
    """What a container names of each claim: claim name to request names, "" for the whole claim.

    Raises:
        ClaimNotCreatedError: the pod's status does not name a claim that the container uses.
    """
    entries = {entry.name: entry for entry in pod.claims}
    requests: dict[str, set[str]] = {}
    for ref in container.requests:
        entry = entries[ref.pod_claim]
        if entry.claim_name is not None or entry.unresolved is not None:
            requests.setdefault(check_resolved(pod, entry), set()).add(ref.request)
    if pod.extended_claim is not None and container.extended:
        requests.setdefault(pod.extended_claim, set()).update(container.extended)
    return requests


def named_requests(pod: Pod) -> Iterator[tuple[str, str, str]]:
    """Every (container, claim name, request) that a container of the pod names one by one."""
    for container in pod.containers:
        for claim_name, wanted in requests_of(pod, container).items():
            for request in sorted(wanted - {""}):
                yield container.name, claim_name, request


def allocates(claim: Claim, request: str) -> bool:
    """Whether the claim's allocation has a device for a request, or for an alternative of it."""
    return any(
        request in (device.request, device.request.partition("/")[0])
        for device in claim.allocation or ()
    )
