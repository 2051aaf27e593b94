"""Settings, each with its unit, its default and the reason for the default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, TypeAlias

from drastate.errors import DriverError, UsageError

#: Where the kubelet's drivers put their registration sockets, unless a driver was built for another
#: root.
KUBELET_PLUGINS_REGISTRY = Path("/var/lib/kubelet/plugins_registry")

#: Root that every plugin endpoint must lie under by default: the kubelet's own root folder. Source:
#: k8s #140837.
KUBELET_ROOT = Path("/var/lib/kubelet")

#: An embedder's hook: is told an error of a driver, says whether it can never heal, so that nobody
#: asks again soon. Called from any thread, in the middle of a call, so it must not block. Source:
#: k8s #125542, KEP 5322.
PermanentError: TypeAlias = Callable[[DriverError], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a manager behaves. Immutable; every field has a default that suits a node.

    Attributes:
        call_timeout_s: total time for one driver call with all its retries. 45 is the kubelet's
            deadline (``defaultClientCallTimeout``); a driver built for the kubelet may count on it.
            Lower: slow drivers fail first. Higher: a hanging driver holds its own pods for longer.
        retry_initial_s: pause before the first retry of a call that got no answer. Arbitrary; a
            driver that restarts is usually back within a second.
        retry_max_s: longest pause between such retries.
        driver_concurrency: how many calls a driver is sent at a time, by driver name; "*" stands
            for all drivers not named. No limit for what is not in it, as in the kubelet: a driver
            may itself need two calls at a time to make progress. One call may be for several claims
            of a pod. Others wait for their turn within their own `call_timeout_s`, first come first
            served; a call that got no answer gives its turn up although the driver may still be at
            it.
        registration_timeout_s: time for one step of the registration handshake. The kubelet gives
            10 s to connect, 1 s to GetInfo and 5 s to NotifyRegistrationStatus; 5 for each step is
            between.
        registry_poll_s: how often the registry folder is looked at. One stat call per look; half a
            second keeps a driver's restart under the second that its author expects.
        first_look_s: how long the first prepare waits for the plugins that were there at start to
            register.
        reconcile_period_s: pause between two reconcile runs. 60 is the kubelet's.
        confirm_gone_s: pause before a snapshot in which a pod is missing is checked by a second
            one.
        snapshot_spacing_s: two looks at the live pods closer than this count as one, whoever asked.
            Arbitrary; a listing that was wrong for a moment must not be its own second opinion.
        retry_owed_max_s: longest pause between two attempts at an unprepare that keeps failing;
            never given up.
        late_effect_guard_s: how long a call that got no answer may still take effect. An unprepare
            within that time is confirmed once more after it, and a prepare waits for a lost
            unprepare. More than `call_timeout_s`, so that the lost call has ended.
        reprepare: when a prepared claim is prepared again at its next use. "restart": once in each
            process, as the kubelet does; "boot": only after a reboot. Source: DESIGN, k8s #119850.
        reprepare_on_register: when a driver registers anew, prepare again what live pods use of it.
            For drivers that lose their memory when they restart. Off, as in the kubelet.
        pod_groups: accept claims that are reserved for, or owned by, the pod's PodGroup (KEP 5729).
        busy_timeout_ms: how long a ledger write waits for a foreign process that locks the file.
        tombstone_days: how long an unprepared claim stays in the ledger as history.
        tombstones_max: how many of them stay at most; the oldest go first.
        events_max: how many events the ledger keeps; the oldest go first. About 200 bytes each.
    """

    call_timeout_s: float = 45.0
    retry_initial_s: float = 0.2
    retry_max_s: float = 5.0
    driver_concurrency: Mapping[str, int] = field(default_factory=dict, hash=False)
    registration_timeout_s: float = 5.0
    registry_poll_s: float = 0.5
    first_look_s: float = 3.0
    reconcile_period_s: float = 60.0
    confirm_gone_s: float = 5.0
    snapshot_spacing_s: float = 0.15
    retry_owed_max_s: float = 60.0
    late_effect_guard_s: float = 60.0
    reprepare: Literal["restart", "boot"] = "restart"
    reprepare_on_register: bool = False
    pod_groups: bool = True
    busy_timeout_ms: int = 5_000
    tombstone_days: float = 14.0
    tombstones_max: int = 20_000
    events_max: int = 200_000

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool | str | Mapping):
                continue
            if not value > 0:
                message = f"setting {each.name} must be more than 0, not {value!r}"
                raise UsageError(message)
        if self.reprepare not in ("restart", "boot"):
            message = f'setting reprepare must be "restart" or "boot", not {self.reprepare!r}'
            raise UsageError(message)
        for name, limit in self.driver_concurrency.items():
            if not isinstance(limit, int) or limit < 1:
                message = (
                    f"setting driver_concurrency must be at least 1 for driver {name}, not "
                    f"{limit!r}; leave it out for no limit"
                )
                raise UsageError(message)
        # A copy: what the caller does with theirs must not change what has been checked.
        object.__setattr__(self, "driver_concurrency", dict(self.driver_concurrency))
