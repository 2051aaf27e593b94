"""The command ``example-driver``: a DRA driver to try things with, as a process of its own.

Loads nothing of drastate until it runs, like every command.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drastate.errors import UsageError

if TYPE_CHECKING:
    import threading

    from drastate.testing.driver import Behaviour, Call, FakeDriver

_ALWAYS = "always"
_DEFAULT_REGISTRY = "/var/lib/kubelet/plugins_registry"
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)

_EPILOG = """\b
Examples:
  # A driver that prepares whatever it is asked to, for a node agent under /tmp/node
  mkdir -p /tmp/node/plugins_registry /tmp/node/cdi
  drastate example-driver --plugins-registry /tmp/node/plugins_registry --cdi-dir /tmp/node/cdi
\b
  # The next one in a rolling update of the same driver
  drastate example-driver --plugins-registry /tmp/node/plugins_registry --instance new
\b
  # A driver that fails twice and takes a second for each call
  drastate example-driver --plugins-registry DIR --fail-prepare 2 --delay-prepare 1
\b
  # A driver that reads what a claim was allocated from YAML files, and logs its calls
  drastate example-driver --plugins-registry DIR --manifests claims/ --call-log calls.jsonl
"""


def _parse_times(_: click.Context, __: click.Parameter, value: str) -> float:
    if value == _ALWAYS:
        return float("inf")
    if not value.isdecimal():
        message = f'"{value}" is neither a count nor "{_ALWAYS}"'
        raise click.BadParameter(message)
    return float(value)


_SECONDS = click.FloatRange(min=0)


@click.command("example-driver", epilog=_EPILOG)
@click.option("--name", default="gpu.example.com", show_default=True, help="Driver name.")
@click.option(
    "--plugins-registry",
    type=_FOLDER,
    default=_DEFAULT_REGISTRY,
    show_default=True,
    help="Folder for the registration socket; the node agent watches it.",
)
@click.option(
    "--plugin-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the driver's own socket, made if missing. "
    "[default: plugins/NAME beside the registry]",
)
@click.option("--instance", default="", help="Put into the names of both sockets.")
@click.option("--cdi-dir", type=_FOLDER, help="Write a CDI spec for each claim there.")
@click.option(
    "--manifests",
    type=_FOLDER,
    help="Read the allocation of claims from YAML files there. "
    "[default: every claim gets one made-up device]",
)
@click.option("--node-name", default="node-a", show_default=True, help="Pool of made-up devices.")
@click.option(
    "--api-version",
    "api_versions",
    type=click.Choice(["v1", "v1beta1"]),
    multiple=True,
    default=["v1", "v1beta1"],
    show_default=True,
    help="Version of DRAPlugin to serve; may be repeated.",
)
@click.option("--delay-prepare", type=_SECONDS, default=0.0, help="Seconds before each prepare.")
@click.option("--delay-unprepare", type=_SECONDS, default=0.0, help="Likewise for unprepare.")
@click.option(
    "--fail-prepare",
    metavar="N|always",
    default="0",
    callback=_parse_times,
    help="So many prepare calls fail.",
)
@click.option(
    "--fail-unprepare",
    metavar="N|always",
    default="0",
    callback=_parse_times,
    help="Likewise for unprepare.",
)
@click.option("--hang-prepare", is_flag=True, help="Never answer a prepare call.")
@click.option("--hang-unprepare", is_flag=True, help="Never answer an unprepare call.")
@click.option("--omit", is_flag=True, help="Leave all claims out of the answers to prepare.")
@click.option(
    "--call-log",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append a JSON line for each claim of each call received, synced before it is answered.",
)
def example_driver(**options: Any) -> None:
    """Runs a DRA driver without devices.

    It registers and serves on unix sockets exactly as a real driver does. Once it serves it prints
    one line that begins with "ready"; SIGTERM and SIGINT end it.
    """
    import signal  # noqa: PLC0415 (loaded when run)
    import threading  # noqa: PLC0415

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    driver = _make_driver(options)
    _serve(driver, stop)


def _make_driver(options: dict[str, Any]) -> FakeDriver:
    from drastate.drivers.validation import (  # noqa: PLC0415
        RegistrationRefusedError,
        check_driver_name,
    )
    from drastate.testing.driver import FakeDriver  # noqa: PLC0415
    from drastate.testing.manifests import devices_from  # noqa: PLC0415

    try:
        name = check_driver_name(options["name"])
    except RegistrationRefusedError as error:
        raise UsageError(f"--name: {error.reason}") from None
    if "/" in options["instance"]:
        raise UsageError("--instance goes into file names and cannot contain a slash")
    apis: tuple[str, ...] = options["api_versions"]
    plugin_dir: Path | None = options["plugin_dir"]
    driver = FakeDriver(
        options["plugins_registry"].absolute(),
        name,
        plugin_dir=plugin_dir.absolute() if plugin_dir is not None else None,
        instance=options["instance"],
        versions=[f"{api}.DRAPlugin" for api in apis],
        serves=apis,
        node_name=options["node_name"],
        cdi_dir=options["cdi_dir"],
    )
    if options["manifests"] is not None:
        driver.devices = devices_from(options["manifests"], driver)
    if options["call_log"] is not None:
        driver.on_call = _make_logger(options["call_log"])
    _set_behaviour(driver.on_prepare, options, "prepare")
    _set_behaviour(driver.on_unprepare, options, "unprepare")
    driver.on_prepare.omit = options["omit"]
    return driver


def _set_behaviour(behaviour: Behaviour, options: dict[str, Any], verb: str) -> None:
    behaviour.delay_s = options[f"delay_{verb}"]
    behaviour.fail_times = options[f"fail_{verb}"]
    behaviour.hang = options[f"hang_{verb}"]


def _make_logger(path: Path) -> Any:
    import json  # noqa: PLC0415
    import os  # noqa: PLC0415
    from datetime import UTC, datetime  # noqa: PLC0415

    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--call-log: {path}: {error.strerror}") from None

    def log(call: Call) -> None:
        for claim in call.claims:
            line = {
                "time": datetime.now(UTC).isoformat(),
                "method": call.method,
                "claim_uid": claim.uid,
                "namespace": claim.namespace,
                "name": claim.name,
                "api": call.api,
            }
            file.write(f"{json.dumps(line)}\n")
        file.flush()
        os.fsync(file.fileno())

    return log


def _serve(driver: FakeDriver, stop: threading.Event) -> None:
    try:
        driver.start()
    except ValueError as error:
        raise UsageError(str(error)) from None
    except (OSError, RuntimeError) as error:
        message = f"cannot serve on {driver.endpoint_path}: {error}"
        raise click.ClickException(message) from None
    try:
        click.echo(f"ready {driver.name} {driver.registration_path} {driver.endpoint_path}")
        stop.wait()
    finally:
        driver.stop()
