"""The kubelet's Dynamic Resource Allocation (DRA) manager as an embeddable library.

Start with `ManagerImpl`. The names below are loaded when they are first used, so that importing the
package, or one room of it, costs only what is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drastate.config import Settings
    from drastate.errors import (
        ClaimError,
        ClusterError,
        DrastateError,
        DriverError,
        LedgerError,
        PrepareError,
        UnprepareError,
        UsageError,
    )
    from drastate.kube.manifests import ManifestFolder
    from drastate.manager.api import Manager
    from drastate.manager.impl import ManagerImpl
    from drastate.model import ContainerInfo, PodSnapshot

_HOMES = {
    "Manager": "drastate.manager.api",
    "ManagerImpl": "drastate.manager.impl",
    "ManifestFolder": "drastate.kube.manifests",
    "Settings": "drastate.config",
    "ContainerInfo": "drastate.model",
    "PodSnapshot": "drastate.model",
    "ClaimError": "drastate.errors",
    "ClusterError": "drastate.errors",
    "DrastateError": "drastate.errors",
    "DriverError": "drastate.errors",
    "LedgerError": "drastate.errors",
    "PrepareError": "drastate.errors",
    "UnprepareError": "drastate.errors",
    "UsageError": "drastate.errors",
}

__all__ = [
    "ClaimError",
    "ClusterError",
    "ContainerInfo",
    "DrastateError",
    "DriverError",
    "LedgerError",
    "Manager",
    "ManagerImpl",
    "ManifestFolder",
    "PodSnapshot",
    "PrepareError",
    "Settings",
    "UnprepareError",
    "UsageError",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
