"""``drastate agent``: the standalone node agent."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Literal

import click

from drastate.cli.node import FOLDER, load_quietly, node_options


@click.command(epilog="Stop it with SIGTERM or Ctrl-C. It can be killed at any instant.")
@click.option(
    "--manifests",
    type=FOLDER,
    required=True,
    help="Folder of Pod and ResourceClaim YAML files: the pods that are to run on this node.",
)
@node_options
@click.option(
    "--node-name", default=platform.node(), show_default="host name", help="Name in the ledger."
)
@click.option(
    "--scan-interval",
    "scan_interval_s",
    type=click.FloatRange(min=0.05),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Pause between two looks at the manifests.",
)
@click.option(
    "--reconcile-period",
    "reconcile_period_s",
    type=click.FloatRange(min=0.1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Pause between two checks for claims that no pod needs any more.",
)
@click.option(
    "--reprepare",
    type=click.Choice(["restart", "boot"]),
    default="restart",
    show_default=True,
    help="Prepare a prepared claim again after each restart of the agent, or only after a reboot.",
)
@click.option(
    "--reprepare-on-register",
    is_flag=True,
    help="Prepare again what pods use of a driver that registers anew: for drivers that forget.",
)
@click.option(
    "--late-effect-guard",
    "late_effect_guard_s",
    type=click.FloatRange(min=0.1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a driver call without an answer may take effect; more than --call-timeout.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="How log lines on stderr look.",
)
@click.option(
    "--log-level",
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
    default="INFO",
    show_default=True,
    help="Least level that is logged.",
)
def agent(
    *,
    manifests: Path,
    state_dir: Path,
    plugins_registry: Path,
    endpoint_root: Path | None,
    node_name: str,
    scan_interval_s: float,
    call_timeout_s: float,
    reconcile_period_s: float,
    reprepare: Literal["restart", "boot"],
    reprepare_on_register: bool,
    late_effect_guard_s: float,
    log_format: Literal["text", "json"],
    log_level: str,
) -> None:
    """Run the node agent over a folder of manifests.

    Each Pod in the folder has its ResourceClaims prepared through the DRA drivers of this node; for
    each, STATE_DIR/pods/UID.json tells the container runtime which CDI devices to inject. A Pod
    that is removed from the folder is unprepared. Pods need a metadata.uid, claims a
    status.allocation.

    \b
    Example:
      drastate agent --manifests /etc/node/pods --state-dir /var/lib/drastate
    """
    load_quietly()
    # grpc and the manager are loaded here, by the command that needs them.
    from drastate.agent.main import AgentOptions, run_agent  # noqa: PLC0415
    from drastate.config import Settings  # noqa: PLC0415

    run_agent(
        AgentOptions(
            manifests=manifests,
            state_dir=state_dir,
            plugins_registry=plugins_registry,
            endpoint_root=endpoint_root,
            node_name=node_name,
            scan_interval_s=scan_interval_s,
            log_format=log_format,
            log_level=log_level.upper(),
            settings=Settings(
                call_timeout_s=call_timeout_s,
                reconcile_period_s=reconcile_period_s,
                reprepare=reprepare,
                reprepare_on_register=reprepare_on_register,
                late_effect_guard_s=late_effect_guard_s,
            ),
        )
    )
