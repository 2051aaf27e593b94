"""What a claim got, read from YAML files as a driver reads it from the API server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from drastate.model import ClaimRef, PreparedDevice
    from drastate.testing.driver import FakeDriver

_SUFFIXES = frozenset({".yaml", ".yml", ".json"})


class ClaimError(Exception):
    """What the driver answers as a claim's error."""


def devices_from(
    folder: Path, driver: FakeDriver
) -> Callable[[ClaimRef], Sequence[PreparedDevice]]:
    """A function for `FakeDriver.devices` that looks a claim's allocation up in a folder.

    The folder is read anew for each claim, so files may come and go while the driver runs.

    Args:
        folder: of YAML or JSON files with ResourceClaims, or lists of them; without sub-folders.
        driver: answers the results that name it.
    """

    def find(claim: ClaimRef) -> list[PreparedDevice]:
        return [_to_device(driver, claim, result) for result in _results(folder, driver, claim)]

    return find


def _results(folder: Path, driver: FakeDriver, claim: ClaimRef) -> list[dict[str, Any]]:
    manifest = _find_claim(folder, claim)
    uid = manifest["metadata"].get("uid")
    if uid is not None and uid != claim.uid:
        message = f"claim {claim} got replaced: its UID is {uid}, not {claim.uid}"
        raise ClaimError(message)
    allocation = (manifest.get("status") or {}).get("allocation")
    if not allocation:
        message = f"claim {claim} is not allocated"
        raise ClaimError(message)
    results = (allocation.get("devices") or {}).get("results") or []
    return [result for result in results if result.get("driver") == driver.name]


def _find_claim(folder: Path, claim: ClaimRef) -> dict[str, Any]:
    for manifest in _load_claims(folder):
        metadata = manifest.get("metadata") or {}
        if (metadata.get("namespace", "default"), metadata.get("name")) == (
            claim.namespace,
            claim.name,
        ):
            return manifest
    message = f"claim {claim} is not found"
    raise ClaimError(message)


def _load_claims(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.iterdir()):
        if path.suffix not in _SUFFIXES or path.name.startswith("."):
            continue
        try:
            documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            message = f"{path.name} cannot be read: {error}"
            raise ClaimError(message) from error
        for document in documents:
            yield from _claims_in(document)


def _claims_in(document: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(document, dict):
        return
    if document.get("kind") == "ResourceClaim":
        yield document
    for item in document.get("items") or []:
        # Items of a typed list often carry no kind of their own.
        if isinstance(item, dict) and item.get("kind", "ResourceClaim") == "ResourceClaim":
            yield item


def _to_device(driver: FakeDriver, claim: ClaimRef, result: dict[str, Any]) -> PreparedDevice:
    share_id = result.get("shareID")
    name = result["device"]
    # A share has a CDI device of its own; the device's name in the answer stays.
    cdi_name = name if share_id is None else f"{name}-{share_id}"
    cdi_device_ids = driver.make_device(claim, cdi_name).cdi_device_ids
    # A container refers to the request, never to the alternative that was chosen for it.
    request = str(result.get("request", "")).partition("/")[0]
    return driver.make_device(
        claim,
        name,
        pool=result["pool"],
        share_id=share_id,
        request_names=(request,) if request else (),
        cdi_device_ids=cdi_device_ids,
    )
