"""CDI device IDs: check them, pick a container's, collect them for the runtime. No I/O here.

A *CDI device ID* is the fully qualified name ``vendor/class=device`` that a driver answers and that
the container runtime looks up in its CDI specs. drastate passes the IDs on and never reads a spec.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from types import MappingProxyType
from typing import TYPE_CHECKING

from drastate.model import AllocatedDevice, ClaimRef, ContainerInfo, DriverName, PreparedDevice

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_log = logging.getLogger(__name__)

#: Key prefix of a CDI annotation. Source: container-device-interface, pkg/cdi annotations.
ANNOTATION_PREFIX = "cdi.k8s.io/"

#: Longest name part of an annotation key. Source: Kubernetes' rule for qualified names.
_NAME_MAX = 63

# The ranges are spelled out because \w and str.isalnum also take letters outside ASCII, which no
# runtime accepts.
_KIND_PART = r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?"
_DEVICE = r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?"
_QUALIFIED = re.compile(rf"{_KIND_PART}/{_KIND_PART}={_DEVICE}")
_ANNOTATION_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")

#: How many drivers are remembered as warned about. A node has a handful; past this many, the
#: warning stays away rather than come again and again.
_WARNED_MAX = 256
_warned: set[str] = set()
_warned_lock = threading.Lock()


def is_qualified(name: str) -> bool:
    """Tells whether ``name`` is a fully qualified CDI device name, ``vendor/class=device``.

    Args:
        name: any text.

    Returns:
        True when a runtime would take it as a device name. A vendor or class of one character is
        valid.

    Source:
        container-device-interface pkg/parser, ``ParseQualifiedName`` and its Validate functions
        (which crash on a one-character vendor or class; there is nothing in the CDI specification
        against those).
    """
    return _QUALIFIED.fullmatch(name) is not None


def annotation_key(driver: str, claim_uid: str) -> str | None:
    """Builds the key of the CDI annotation that carries one driver's devices of one claim.

    Args:
        driver: the driver's name; with a UID of 36 characters it can have at most 26.
        claim_uid: UID of the claim.

    Returns:
        The key, or None when the name part would be over 63 characters or holds a character that is
        not allowed.

    Source:
        kubelet 1.27-1.30, pkg/kubelet/cm/dra/cdi.go, ``generateCDIAnnotations`` (which fails the
        pod instead).
    """
    name = f"{driver}_{claim_uid}".replace("/", "_")
    if len(name) > _NAME_MAX or _ANNOTATION_NAME.fullmatch(name) is None:
        return None
    return ANNOTATION_PREFIX + name


def base_request(request: str) -> str:
    """Names the request of a claim that ``request`` belongs to: "gpu" for "gpu" and "gpu/large"."""
    return request.partition("/")[0]


def devices_for_requests(devices: Iterable[PreparedDevice], requests: Collection[str]) -> list[str]:
    """Picks the CDI device IDs that a container gets for the requests of one claim that it names.

    Args:
        devices: the prepared devices of the claim, in the order in which they were recorded.
        requests: names of requests; "" stands for the whole claim. A request also gets the devices
            of its subrequests.

    Returns:
        The IDs in recorded order, each once. Empty when no request is named.

    Source:
        kubelet ``ClaimInfo.cdiDevicesAsList``; ours are the subrequests (a driver that does not use
        the official helper answers "request/subrequest", while a container names the request) and
        the missing duplicates.
    """
    wanted = frozenset(requests)
    found: dict[str, None] = {}
    for device in devices:
        if _belongs_to(device, wanted):
            found.update(dict.fromkeys(device.cdi_device_ids))
    return list(found)


def _belongs_to(device: PreparedDevice, wanted: Collection[str]) -> bool:
    if not wanted:
        return False
    if "" in wanted or not device.request_names:
        return True
    return any(name in wanted or base_request(name) in wanted for name in device.request_names)


def with_full_request_names(
    devices: Sequence[PreparedDevice], allocation: Sequence[AllocatedDevice], driver: str
) -> tuple[PreparedDevice, ...]:
    """Gives devices back the subrequest that their driver left out of the request names.

    The official driver helper answers "gpu" for a device that was allocated for "gpu/large", so
    that a container that names "gpu/small" could not be told from one that names "gpu/large". The
    allocation still knows.

    Args:
        devices: the answer of ``driver`` for one claim.
        allocation: the claim's allocation, of all its drivers.
        driver: the driver's name.

    Returns:
        The same devices in the same order. A request name "gpu" is replaced by "gpu/large" where
        the allocation of the same device (and the same share, when both have a share ID) says so.

    Source:
        KEP 4816 (prioritized lists); dynamic-resource-allocation kubeletplugin, which strips the
        names.
    """
    mine = [each for each in allocation if each.driver == driver and "/" in each.request]
    if not mine:
        return tuple(devices)
    return tuple(_with_full_names(device, mine) for device in devices)


def _with_full_names(
    device: PreparedDevice, allocation: Iterable[AllocatedDevice]
) -> PreparedDevice:
    full: dict[str, list[str]] = {}
    for each in allocation:
        if (each.pool, each.device) != (device.pool, device.device):
            continue
        if each.share_id and device.share_id and each.share_id != device.share_id:
            continue
        if each.request not in device.request_names:
            full.setdefault(base_request(each.request), []).append(each.request)
    names: dict[str, None] = {}
    for name in device.request_names:
        names.update(dict.fromkeys(full.get(name, [name])))
    if tuple(names) == device.request_names:
        return device
    return dataclasses.replace(device, request_names=tuple(names))


def container_info(parts: Iterable[tuple[ClaimRef, DriverName, Sequence[str]]]) -> ContainerInfo:
    """Collects what one container gets into the form that its runtime takes.

    Where a driver's name is too long for an annotation key, its devices are in `cdi_devices` alone,
    and that is logged once for the driver in the life of the process.

    Args:
        parts: claim, driver and CDI device IDs, in the order in which the devices shall appear. The
            same claim and driver may come more than once.

    Returns:
        All IDs in the order given, each once; and one annotation for each claim and driver that has
        any.
    """
    all_ids: dict[str, None] = {}
    by_key: dict[str, dict[str, None]] = {}
    for ref, driver, ids in parts:
        if not ids:
            continue
        all_ids.update(dict.fromkeys(ids))
        key = annotation_key(driver, ref.uid)
        if key is None:
            _warn_once(driver, ref)
        else:
            by_key.setdefault(key, {}).update(dict.fromkeys(ids))
    annotations = {key: ",".join(ids) for key, ids in by_key.items()}
    return ContainerInfo(tuple(all_ids), MappingProxyType(annotations))


def _warn_once(driver: DriverName, ref: ClaimRef) -> None:
    with _warned_lock:
        if driver in _warned or len(_warned) >= _WARNED_MAX:
            return
        _warned.add(driver)
    _log.warning(
        "Driver and claim UID make no valid CDI annotation key (63 characters at most); "
        "its devices are passed as CDI device names only",
        extra={"driver": driver, "claim_uid": ref.uid},
    )
