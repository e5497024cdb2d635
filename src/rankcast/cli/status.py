"""``rankcast status``: how a fleet is, for people and for scripts.

This module knows the command's options, its exit codes and how a status reads. It must not know how engines are asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rankcast.cli import options
from rankcast.cli.output import FAILED, UNREACHABLE, people, reported, write_json

if TYPE_CHECKING:
    from rankcast.control.status import EngineStatus, FleetStatus

# Clients give up by themselves, with a better message, before they are given up.
_SLACK_SECONDS = 1.0


def status(
    urls: options.Urls,
    header: options.Headers = None,
    listen: options.Listen = None,
    timeout: Annotated[float, typer.Option(metavar="S", help="Seconds an engine may take to answer.")] = 30.0,
    tls_verify: options.TlsVerify = True,
    json: options.Json = False,
) -> None:
    """Each worker's identity, weight version, generation, schedule hash and state; says when a fleet is mixed.

    Changes nothing, and works while a push is running. Exits with 0 when every worker is servable and all serve the
    same published version, with 1 when the fleet is mixed or unusable, and with 2 when an engine cannot be reached.
    """
    headers = options.parse_headers(header)
    if not timeout > 0:
        raise typer.BadParameter("it must be a positive number of seconds", param_hint="--timeout")
    with reported(json):
        from rankcast.control.status import ask_status, conclude
        from rankcast.trainer.targets import clients
        from rankcast.wire.codec import Codec, find_secret

        codec = Codec(find_secret())
        asked = clients(urls, headers=headers, tls_verify=tls_verify, timeout=timeout)
        fleet = conclude(ask_status(asked, codec, listen=listen, timeout=timeout + _SLACK_SECONDS))
        if json:
            write_json(fleet)
        else:
            _show(fleet)
    raise typer.Exit(exit_code(fleet))


def exit_code(fleet: FleetStatus) -> int:
    """0: whole and published; 1: mixed or unusable; 2: an engine cannot be reached."""
    if not fleet.reachable:
        return UNREACHABLE
    return FAILED if fleet.problems or fleet.mixed or not fleet.servable else 0


def _show(fleet: FleetStatus) -> None:
    from rich.table import Table

    console = people()
    for engine in fleet.engines:
        console.print(_headline(engine), markup=False, soft_wrap=True, style="bold")
        if not engine.workers:
            continue
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for name in ("worker", "dp", "pp", "tp", "ep", "pid"):
            table.add_column(name, justify="right")
        for name in ("device", "state", "servable", "published", "installed", "generation", "plan"):
            table.add_column(name, overflow="fold")
        for row in engine.workers:
            who = row.worker
            table.add_row(
                *map(str, (who.rank, who.dp, who.pp, who.tp, who.ep)),
                "-" if who.process is None else str(who.process.pid),
                who.device or "cpu",
                row.state,
                "yes" if row.servable else "NO",
                row.weight_version or "-",
                row.attested_version or "-",
                str(row.generation),
                row.plan_hash[:12] or "-",
                style=None if row.servable else "red",
            )
        console.print(table)
    for problem in fleet.problems:
        console.print(problem, markup=False, soft_wrap=True, style="red")
    if exit_code(fleet) == 0:
        count = sum(len(engine.workers) for engine in fleet.engines)
        version = "weights without a version" if not fleet.weight_version else repr(fleet.weight_version)
        console.print(f"all {count} workers serve {version}", markup=False, soft_wrap=True, style="green")


def _headline(engine: EngineStatus) -> str:
    if not engine.reachable:
        return f"{engine.where}  cannot be reached"
    parts = [engine.where]
    if engine.workers:
        parts.append(f"engine {engine.workers[0].worker.engine[:8]}")
    if engine.weight_version is not None:
        parts.append(f"serves {engine.weight_version!r}")
    if engine.paused is not None:
        parts.append("paused" if engine.paused else "not paused")
    return "  ".join(parts)
