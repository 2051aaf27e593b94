"""Validation before anything is recorded: may the pod use its claims, and can they be prepared now?

Nothing here changes the ledger for the pod that is refused, so a refused pod owes nothing and can
be deleted without any driver (kubelet 1.34+, "validation pass").
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from drastate.errors import (
    AllocationChangedError,
    ClaimError,
    ClusterError,
    DeviceInUseError,
    DrastateError,
    DriverNotRegisteredError,
    PrepareError,
    UIDMismatchError,
)
from drastate.kube.source import ClaimSource
from drastate.manager import lifecycle, rules
from drastate.manager.context import Context
from drastate.manager.unprepare import Unpreparer
from drastate.model import (
    AllocatedDevice,
    Claim,
    ClaimUID,
    DriverName,
    Operation,
    Pod,
    PodUID,
)
from drastate.reconcile import LivePods

_log = logging.getLogger(__name__)

#: Looks at the live pods, this far apart, that decide whether an older claim's pods are gone.
_LOOKS = 3
_LOOK_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class _Reason:
    """Why a claim that is in the way is still there."""

    text: str
    cause: DrastateError | None = None


#: It is being unprepared, or prepared, this very moment; or let go, but not for certain yet.
_ENDING = _Reason("has not let go of it for certain yet; try again")


class Admission:
    """Decides whether a pod's claims can be prepared."""

    def __init__(self, context: Context, source: ClaimSource, unpreparer: Unpreparer) -> None:
        self._context = context
        self._source = source
        self._unpreparer = unpreparer
        #: Who is alive; replaced when the manager starts.
        self.live = LivePods(None, settings=context.settings, clock=context.clock)

    def admit(self, pod: Pod) -> list[Claim]:
        """The pod's claims, each once, in the pod's order.

        Raises:
            ClaimError: a claim cannot be used (yet).
            ClusterError: a claim could not be read.
            DriverNotRegisteredError: a driver that would have to be called is not there.
            PrepareError: more than one of these.
        """
        claims, failures = self._usable(pod)
        failures += self._changed_allocations(pod, claims)
        failures += self._missing_drivers(claims)
        if not failures:
            failures += self._make_room(pod, claims)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise PrepareError(pod=str(pod), pod_uid=pod.uid, failures=failures)
        self._warn_of_unknown_requests(pod, claims)
        return claims

    def _usable(self, pod: Pod) -> tuple[list[Claim], list[DrastateError]]:
        by_name: dict[str, Claim] = {}
        failures: list[DrastateError] = []
        for pod_claim in rules.wanted_claims(pod):
            try:
                name = rules.check_resolved(pod, pod_claim)
                claim = by_name.get(name) or self._source.get_claim(pod.namespace, name)
                rules.check_usable(
                    pod, pod_claim, claim, pod_groups=self._context.settings.pod_groups
                )
            except (ClaimError, ClusterError) as error:
                failures.append(error)
            else:
                by_name[name] = claim
        # By UID: a source may know one claim under two names.
        return list({claim.ref.uid: claim for claim in by_name.values()}.values()), failures

    def _changed_allocations(self, pod: Pod, claims: Sequence[Claim]) -> list[DrastateError]:
        """An error for each claim that holds devices at a driver its allocation does not name now.

        Source: ours. The kubelet compares UIDs alone and goes on with the drivers of before.
        """
        failures: list[DrastateError] = []
        for claim in claims:
            record = self._context.ledger.find(claim.ref.uid)
            if record is None or not record.active_pods:
                continue
            named = lifecycle.skipped_operations(claim).keys()
            left = sorted(
                name
                for name, driver in record.drivers.items()
                if name not in named and lifecycle.owes_call(driver)
            )
            if left:
                failures.append(
                    AllocationChangedError(
                        f"ResourceClaim {claim.ref} ({claim.ref.uid}) was allocated anew, but still"
                        f" holds what {', '.join(left)} prepared for it; unprepare the pods that"
                        f" hold it first: {', '.join(map(str, record.active_pods))}",
                        claim=str(claim.ref),
                        claim_uid=claim.ref.uid,
                        pod_uid=pod.uid,
                    )
                )
        return failures

    def _missing_drivers(self, claims: Sequence[Claim]) -> list[DrastateError]:
        """An error for each driver that has to be called and is not registered.

        A claim that is prepared needs no driver. (The kubelet asks for it all the same.)
        """
        context = self._context
        failures: list[DrastateError] = []
        for claim in claims:
            record = context.ledger.find(claim.ref.uid)
            for driver, skip in lifecycle.skipped_operations(claim).items():
                known = record.drivers.get(driver) if record else None
                if Operation.PREPARE in skip:
                    continue
                if not context.needs_prepare(claim.ref.uid, driver, known):
                    continue
                if not context.drivers.is_registered(driver):
                    failures.append(_not_registered(claim, driver, context))
        return failures

    # --- claims that are in the way ---

    def _make_room(self, pod: Pod, claims: Sequence[Claim]) -> list[DrastateError]:
        """Unprepares what is in the claims' way and whose pods are gone; why not, otherwise.

        In the way is an older claim of the same name (k8s #131617: identity by name; the kubelet
        waits there), and one that holds a device which the claim was given (k8s #141471).
        """
        context = self._context
        failures: list[DrastateError] = []
        for claim in claims:
            in_the_way: dict[ClaimUID, Callable[[_Reason], DrastateError]] = {
                older.ref.uid: partial(_mismatch, pod, claim, older.ref.uid)
                for older in context.ledger.named(claim.ref.namespace, claim.ref.name)
                if older.ref.uid != claim.ref.uid
            }
            devices = lifecycle.exclusive_devices(claim)
            for held in context.holds.find_conflicts(claim.ref.uid, devices):
                error = partial(device_in_use, context, claim, pod.uid, held)
                in_the_way.setdefault(held[1], error)
            for uid, make_error in in_the_way.items():
                if reason := self._evict(uid):
                    failures.append(make_error(reason))
        return failures

    def _evict(self, uid: ClaimUID) -> _Reason | None:
        """Unprepares a claim when its pods are gone; why it is still there, otherwise."""
        record = self._context.ledger.find(uid)
        if record is None:
            return None
        holders = {holder.uid for holder in record.active_pods}
        if holders and not self._are_gone(holders):
            names = ", ".join(f"{p.namespace}/{p.name} ({p.uid})" for p in record.active_pods)
            return _Reason(f"is still held by {names}; it has to end first")
        errors = self._unpreparer.finish([record.ref.uid], holders).get(record.ref.uid, [])
        return _Reason(f"has to end first: {errors[0].message}", errors[0]) if errors else None

    def _are_gone(self, pods: set[PodUID]) -> bool:
        clock = self._context.clock
        for look in range(_LOOKS):
            if look:
                clock.sleep(_LOOK_PAUSE_S)
            if pods <= self.live.gone(self._context.ledger.pods()):
                return True
            if not self.live.suspects(pods):
                return False
        return False

    # --- mistakes that the kubelet passes over in silence ---

    def _warn_of_unknown_requests(self, pod: Pod, claims: Sequence[Claim]) -> None:
        """A container that names a request the allocation lacks would start without devices."""
        if self._context.ledger.holds(pod.uid):
            return
        by_name = {claim.ref.name: claim for claim in claims}
        for container, claim_name, request in rules.named_requests(pod):
            claim = by_name.get(claim_name)
            if claim is None or rules.allocates(claim, request):
                continue
            _log.warning(
                "a container names a request that its claim's allocation lacks; it gets no device",
                extra={
                    "pod": str(pod),
                    "pod_uid": pod.uid,
                    "container": container,
                    "claim": str(claim.ref),
                    "claim_uid": claim.ref.uid,
                    "request": request,
                },
            )


def _not_registered(claim: Claim, driver: DriverName, context: Context) -> DriverNotRegisteredError:
    return DriverNotRegisteredError(
        f"ResourceClaim {claim.ref} needs driver {driver}: {context.drivers.explain(driver)}",
        driver=driver,
        claim=str(claim.ref),
        claim_uid=claim.ref.uid,
    )


def _mismatch(pod: Pod, claim: Claim, held_uid: ClaimUID, why: _Reason) -> UIDMismatchError:
    error = UIDMismatchError(
        f"ResourceClaim {claim.ref} was re-created as {claim.ref.uid}, but the older one"
        f" ({held_uid}) {why.text}",
        claim=str(claim.ref),
        held_uid=held_uid,
        claim_uid=claim.ref.uid,
        pod_uid=pod.uid,
    )
    error.__cause__ = why.cause
    return error


def device_in_use(
    context: Context,
    claim: Claim,
    pod_uid: PodUID,
    held: tuple[AllocatedDevice, ClaimUID],
    why: _Reason = _ENDING,
) -> DeviceInUseError:
    """The error of a claim whose device another claim holds.

    Args:
        context: the rooms.
        claim: the claim that was to be prepared.
        pod_uid: for this pod.
        held: what it was given, and who holds that.
        why: why the holder is still there.
    """
    device, uid = held
    name = "/".join(filter(None, (device.driver, device.pool, device.device, device.share_id)))
    record = context.ledger.find(uid)
    holder = f"{record.ref} ({uid})" if record else uid
    error = DeviceInUseError(
        f"ResourceClaim {claim.ref} ({claim.ref.uid}) cannot be prepared: its device {name} belongs"
        f" to ResourceClaim {holder}, which {why.text}",
        claim=str(claim.ref),
        claim_uid=claim.ref.uid,
        device=name,
        held_uid=uid,
        pod_uid=pod_uid,
    )
    error.__cause__ = why.cause
    return error
