"""``drastate prepare`` and ``drastate unprepare``: one pod or a few, once, in the same ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from drastate.cli.node import load_quietly, node_options
from drastate.errors import DrastateError, UsageError

if TYPE_CHECKING:  # loaded when the command runs: it brings grpc
    from drastate.manager.impl import ManagerImpl
    from drastate.model import Pod

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@contextmanager
def _manager(
    source: Any,
    state_dir: Path,
    plugins_registry: Path,
    endpoint_root: Path | None,
    call_timeout_s: float,
) -> Iterator[ManagerImpl]:
    load_quietly()
    from drastate.config import Settings  # noqa: PLC0415
    from drastate.manager.impl import ManagerImpl  # noqa: PLC0415

    with ManagerImpl(
        source,
        state_dir=state_dir,
        plugins_registry=plugins_registry,
        endpoint_root=endpoint_root,
        settings=Settings(call_timeout_s=call_timeout_s),
    ) as manager:
        manager.start()
        yield manager


@click.command()
@click.option(
    "-f",
    "--file",
    "path",
    type=_FILE,
    required=True,
    help="YAML file with the Pods and the ResourceClaims they use.",
)
@node_options
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "yaml"]),
    default="table",
    show_default=True,
    help="How the devices are printed.",
)
def prepare(  # noqa: PLR0917 (click names them)
    path: Path,
    state_dir: Path,
    plugins_registry: Path,
    endpoint_root: Path | None,
    call_timeout_s: float,
    output: Literal["table", "json", "yaml"],
) -> None:
    """Prepare the pods in FILE once, and print the CDI devices of each container.

    What is prepared stays so, in the claim ledger, until `drastate unprepare` (or an agent on the
    same state folder) lets go of it. Repeating the command is harmless.

    \b
    Example:
      drastate prepare -f pod.yaml --state-dir ./state --plugins-registry ./plugins_registry
    """
    from drastate.kube.manifests import StaticClaims, load_file  # noqa: PLC0415

    found = load_file(path)
    if not found.pods:
        raise UsageError(f"{path}: there is no Pod in it; put the Pod and its ResourceClaims there")
    source = StaticClaims([each.claim for each in found.claims])
    done: list[dict[str, object]] = []
    failed: list[DrastateError] = []
    with _manager(source, state_dir, plugins_registry, endpoint_root, call_timeout_s) as manager:
        for manifest in found.pods:
            try:
                manager.prepare_pod_resources(manifest.pod)
                done.append(_devices(manager, manifest.pod))
            except DrastateError as error:
                failed.append(error)
    _print(done, output)
    _raise_all(failed)


def _devices(manager: ManagerImpl, pod: Pod) -> dict[str, object]:
    return {
        "pod": {"uid": pod.uid, "namespace": pod.namespace, "name": pod.name},
        "containers": [
            {
                "name": container.name,
                "cdi_devices": list(info.cdi_devices),
                "annotations": dict(info.annotations),
            }
            for container in pod.containers
            for info in (manager.get_resources(pod, container.name),)
        ],
    }


def _print(done: list[dict[str, Any]], output: Literal["table", "json", "yaml"]) -> None:
    if output == "json":
        click.echo(json.dumps(done, indent=2))
    elif output == "yaml":
        import yaml  # noqa: PLC0415

        click.echo(yaml.safe_dump(done, sort_keys=False), nl=False)
    else:
        for entry in done:
            pod = entry["pod"]
            click.echo(f"pod {pod['namespace']}/{pod['name']} ({pod['uid']})")
            for container in entry["containers"]:
                devices = ", ".join(container["cdi_devices"]) or "no devices"
                click.echo(f"  container {container['name']}: {devices}")


@click.command()
@click.option("-f", "--file", "path", type=_FILE, help="YAML file with the Pods to let go of.")
@click.option(
    "--pod", "uids", multiple=True, metavar="UID", help="UID of a pod to let go of; repeatable."
)
@node_options
def unprepare(  # noqa: PLR0917 (click names them)
    path: Path | None,
    uids: tuple[str, ...],
    state_dir: Path,
    plugins_registry: Path,
    endpoint_root: Path | None,
    call_timeout_s: float,
) -> None:
    """Let go of pods: by FILE, or by UID when there is no file any more.

    A driver is called for each claim that no other pod holds. Only the ledger is read, so the
    claims need not exist any more. Letting go of a pod that holds nothing is fine.

    \b
    Examples:
      drastate unprepare -f pod.yaml --state-dir ./state --plugins-registry ./plugins_registry
      drastate unprepare --pod 5f2c… --state-dir ./state --plugins-registry ./plugins_registry
    """
    from drastate.kube.manifests import StaticClaims, load_file  # noqa: PLC0415

    pods = {uid: uid for uid in uids}
    if path is not None:
        pods.update({each.pod.uid: str(each.pod) for each in load_file(path).pods})
    if not pods:
        raise UsageError("name the pods to let go of: -f FILE with a Pod in it, or --pod UID")
    failed: list[DrastateError] = []
    with _manager(
        StaticClaims([]), state_dir, plugins_registry, endpoint_root, call_timeout_s
    ) as manager:
        for uid, name in pods.items():
            held = manager.pod_might_need_to_unprepare_resources(uid)
            try:
                manager.unprepare_resources(uid)
                click.echo(f"pod {name}: {'unprepared' if held else 'holds nothing'}")
            except DrastateError as error:
                failed.append(error)
    _raise_all(failed)


def _raise_all(failed: list[DrastateError]) -> None:
    """Prints all failures but the last, and raises that: it gives the exit status."""
    for error in failed[:-1]:
        click.echo(f"drastate: error: {error}", err=True)
    if failed:
        raise failed[-1]
