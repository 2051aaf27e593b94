"""A container's devices, from the ledger alone."""

from __future__ import annotations

from collections.abc import Iterator

from drastate import cdi
from drastate.errors import InvalidPodError, NotPreparedError
from drastate.manager import rules
from drastate.manager.context import Context
from drastate.model import (
    ClaimRecord,
    ClaimRef,
    ClaimState,
    Container,
    ContainerInfo,
    DriverName,
    Operation,
    Pod,
)

#: A pod holds the claim, and yet: a driver that an earlier allocation of the claim named.
_OVER = (ClaimState.UNPREPARING, ClaimState.UNPREPARED)


def find_container(pod: Pod, name: str) -> Container:
    """The container of that name, init and ephemeral ones included.

    Raises:
        InvalidPodError: the pod has none.
    """
    for container in pod.containers:
        if container.name == name:
            return container
    known = ", ".join(container.name for container in pod.containers) or "none"
    raise InvalidPodError(f"pod {pod} has no container {name!r}; it has: {known}")


def container_info(context: Context, pod: Pod, container: str) -> ContainerInfo:
    """What the runtime needs for one container.

    Raises:
        InvalidPodError: no such container.
        ClaimNotCreatedError: the pod's status does not name a claim.
        NotPreparedError: a claim is not prepared for the pod, or was before a reboot.
    """
    requests = rules.requests_of(pod, find_container(pod, container))
    held = {record.ref.name: record for record in context.ledger.of_pod(pod.uid)}
    return cdi.container_info(
        part
        for name, wanted in requests.items()
        for part in _parts(context, pod, name, held.get(name), wanted)
    )


def _parts(
    context: Context, pod: Pod, name: str, record: ClaimRecord | None, wanted: set[str]
) -> Iterator[tuple[ClaimRef, DriverName, list[str]]]:
    if record is None:
        raise NotPreparedError(
            f"ResourceClaim {pod.namespace}/{name} is not prepared for pod {pod} ({pod.uid}):"
            " call prepare_resources first",
            claim=f"{pod.namespace}/{name}",
            pod_uid=pod.uid,
        )
    if record.pods[pod.uid].releasing:
        raise NotPreparedError(
            f"ResourceClaim {record.ref} is being unprepared for pod {pod} ({pod.uid}):"
            " prepare it again first",
            claim=str(record.ref),
            claim_uid=record.ref.uid,
            pod_uid=pod.uid,
        )
    for driver, known in sorted(record.drivers.items()):
        if known.state in _OVER:
            continue
        skipped = Operation.PREPARE in known.skip
        if not skipped and not context.is_current(record.ref.uid, driver, known):
            before = " since the last reboot" if known.devices else ""
            raise NotPreparedError(
                f"ResourceClaim {record.ref} is {known.state} at driver {driver} and was not"
                f" prepared{before}: call prepare_resources first",
                claim=str(record.ref),
                claim_uid=record.ref.uid,
                pod_uid=pod.uid,
            )
        yield record.ref, driver, cdi.devices_for_requests(known.devices, wanted)
