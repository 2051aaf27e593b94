"""Which claim holds which device, so that one device is never prepared for two claims at once."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from drastate.model import (
    AllocatedDevice,
    ClaimRecord,
    ClaimState,
    ClaimUID,
    DriverName,
)

_Key = tuple[DriverName, str, str, str | None]


class DeviceHolds:
    """The devices of all claims that are held or owed. Thread-safe.

    A device with a share ID is another device for each ID (KEP 5075); one for admin access is held
    by nobody (KEP 5018).

    Source: ours. The kubelet leaves it to drivers, and a force-deleted pod's device was prepared
        for the next claim before it was unprepared for the last (k8s #141471).
    """

    def __init__(self, records: Iterable[ClaimRecord]) -> None:
        """Takes over what the ledger's claims hold."""
        self._mutex = threading.Lock()
        self._claims: dict[_Key, set[ClaimUID]] = {}
        self._keys: dict[tuple[ClaimUID, DriverName], set[_Key]] = {}
        for record in records:
            for driver in record.drivers.values():
                if driver.state is not ClaimState.UNPREPARED:
                    self._add(record.ref.uid, driver.allocated)

    def find_conflicts(
        self, uid: ClaimUID, devices: Iterable[AllocatedDevice]
    ) -> list[tuple[AllocatedDevice, ClaimUID]]:
        """The devices that others hold, and who. What the claim itself holds is no conflict."""
        with self._mutex:
            return self._conflicts(uid, devices)

    def take(
        self, uid: ClaimUID, devices: tuple[AllocatedDevice, ...]
    ) -> list[tuple[AllocatedDevice, ClaimUID]]:
        """Gives a claim its devices, all of them or, when others hold one, none.

        Returns:
            As `find_conflicts`; empty when the claim has got them.
        """
        with self._mutex:
            conflicts = self._conflicts(uid, devices)
            if not conflicts:
                self._add(uid, devices)
            return conflicts

    def drop(self, uid: ClaimUID, driver: DriverName) -> None:
        """The claim holds nothing at that driver any more."""
        with self._mutex:
            for key in self._keys.pop((uid, driver), ()):
                claims = self._claims[key]
                claims.discard(uid)
                if not claims:
                    del self._claims[key]

    def _conflicts(
        self, uid: ClaimUID, devices: Iterable[AllocatedDevice]
    ) -> list[tuple[AllocatedDevice, ClaimUID]]:
        found = []
        for device in devices:
            claims = () if device.admin_access else self._claims.get(_key(device), ())
            if uid not in claims:
                found += [(device, other) for other in sorted(claims)]
        return found

    def _add(self, uid: ClaimUID, devices: Iterable[AllocatedDevice]) -> None:
        for device in devices:
            if not device.admin_access:
                key = _key(device)
                self._claims.setdefault(key, set()).add(uid)
                self._keys.setdefault((uid, device.driver), set()).add(key)


def _key(device: AllocatedDevice) -> _Key:
    return device.driver, device.pool, device.device, device.share_id
