"""CDI spec files of a fake driver, one per claim."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from drastate.model import PreparedDevice

#: Old enough for every runtime that knows CDI at all.
_CDI_VERSION = "0.5.0"


def default_kind(driver: str) -> str:
    """The CDI kind (vendor/class) of a fake driver: "gpu.example.com/gpu" for gpu.example.com."""
    vendor = driver if driver[:1].isalpha() else f"x{driver}"
    label = vendor.partition(".")[0]
    return f"{vendor}/{label}"


def write_spec(folder: Path, kind: str, claim_uid: str, devices: Sequence[PreparedDevice]) -> None:
    """Writes the spec of a claim; whoever reads sees the old one or the new one, never a half.

    Args:
        folder: of CDI specs; exists.
        kind: vendor/class of the spec; CDI device IDs of other kinds are left out.
        claim_uid: names the file.
        devices: what the claim got.
    """
    label = kind.partition("/")[2].upper().replace("-", "_").replace(".", "_")
    entries = [
        {
            "name": cdi_id.partition("=")[2],
            "containerEdits": {"env": [f"{label}_DEVICE_{number}={device.pool}/{device.device}"]},
        }
        for number, device in enumerate(devices)
        for cdi_id in device.cdi_device_ids
        if cdi_id.startswith(f"{kind}=")
    ]
    spec = {"cdiVersion": _CDI_VERSION, "kind": kind, "devices": entries}
    path = spec_path(folder, kind, claim_uid)
    # Without ".json" at its end the half-written file is no spec for anybody.
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(spec, indent=2) + "\n")
    os.replace(temporary, path)  # noqa: PTH105 (says what it is)


def remove_spec(folder: Path, kind: str, claim_uid: str) -> None:
    """Removes the spec of a claim, if there is one."""
    spec_path(folder, kind, claim_uid).unlink(missing_ok=True)


def spec_path(folder: Path, kind: str, claim_uid: str) -> Path:
    """Where the spec of a claim lies."""
    return folder / f"{kind.replace('/', '-')}_{claim_uid}.json"
