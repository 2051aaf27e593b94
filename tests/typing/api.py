"""How an embedder uses the public names; checked by mypy --strict, never run."""

from __future__ import annotations

from collections.abc import Mapping

from drastate import (
    ContainerInfo,
    DrastateError,
    Manager,
    ManagerImpl,
    ManifestFolder,
    PodSnapshot,
    Settings,
)
from drastate.model import PodUID


def active_pods() -> PodSnapshot:
    return PodSnapshot({PodUID("a")}, complete=True)


def embed(pod: Mapping[str, object]) -> tuple[str, ...]:
    settings = Settings(call_timeout_s=10.0, reprepare="boot")
    with ManagerImpl(ManifestFolder("manifests"), state_dir="state", settings=settings) as manager:
        manager.start(active_pods)
        return use(manager, pod).cdi_devices


def use(manager: Manager, pod: Mapping[str, object]) -> ContainerInfo:
    try:
        manager.prepare_pod_resources(pod)
        info: ContainerInfo = manager.get_resources(pod, "main")
        annotations: Mapping[str, str] = info.annotations
        print(annotations)
        held: bool = manager.pod_might_need_to_unprepare_resources("a")
        if held:
            manager.unprepare_resources("a")
    except DrastateError as error:
        if not error.can_retry:
            raise
        for failure in error.failures:
            print(failure.message, error.succeeded)
    return manager.prepare_resources(pod, "main")
