"""Talks to DRA drivers: finds their plugins, keeps connections to them, makes the calls.

The kubelet's protocol as it is, over unix sockets: plugin registration and DRAPlugin v1 and
v1beta1. Nothing here knows of pods, of a ledger or of a cluster. What a driver does wrong is never
an exception but a `CallResult`.
"""

from __future__ import annotations

from drastate.drivers.client import DriverClient
from drastate.drivers.plugin import PluginInfo

__all__ = ["DriverClient", "PluginInfo"]
