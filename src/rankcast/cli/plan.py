"""``rankcast plan``: what a sync of a model would move, without running it.

This module knows the command's options and how a simulated sync reads. It must not know how anything is planned.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankcast.cli import options
from rankcast.cli.output import people, reported, write_json

if TYPE_CHECKING:
    from rankcast.plan.cost import Simulation

_TRAINER = "Trainer grid: tp=,cp=,pp=,ep=,etp=,dp= as Megatron counts, or fsdp=,dp=."
_ROLLOUT = "Rollout grid: tp=,pp=,dp=,ep= of each engine as vLLM counts, and engines=."


def plan(
    model: Annotated[Path, typer.Option(metavar="CONFIG.json", help="A model's config.json, or its directory.")],
    trainer: Annotated[str, typer.Option(metavar="GRID", help=_TRAINER)],
    rollout: Annotated[str, typer.Option(metavar="GRID", help=_ROLLOUT)],
    bucket: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of a bucket, where a mode has any.")] = "512MiB",
    json: options.Json = False,
) -> None:
    """What one sync would move in each mode: update calls, bytes for each worker and trainer rank, bytes of messages.

    Runs no process and reads no weights: config.json and the two grids say everything. A grid that does not divide the
    model is refused, saying by what.

    broadcast and per_layer are a trainer that gathers every tensor and feeds it to the engine's own loader, without and
    with a list for each layer: what people do today. ranklocal and direct are rankcast's.
    """
    size = options.parse_size(bucket, "--bucket")
    with reported(json):
        from rankcast.plan.cost import simulate
        from rankcast.plan.grids import RolloutGrid, TrainerGrid

        simulation = simulate(_read(model), TrainerGrid.parse(trainer), RolloutGrid.parse(rollout), size)
        found = _record(simulation, size)
        if json:
            write_json(found)
        else:
            _show(simulation, found)


def _read(model: Path) -> dict[str, Any]:
    import msgspec

    from rankcast.errors import UnsupportedError

    path = model / "config.json" if model.is_dir() else model
    try:
        config = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as fault:
        raise UnsupportedError(f"{path} cannot be read as JSON ({fault}): name a model's config.json") from None
    if not isinstance(config, dict):
        raise UnsupportedError(f"{path} holds a {type(config).__name__}, not an object of settings")
    return config


def _record(simulation: Simulation, bucket_bytes: int) -> dict[str, Any]:
    """What ``--json`` prints. Bytes of workers and senders are those of the one that has most."""
    import msgspec

    from rankcast.plan.requests import request_bytes

    sent = simulation.sender_bytes()
    return {
        "model_type": simulation.tensors.family.model_type,
        "left_out": simulation.tensors.family.left_out,
        "tensors": len(simulation.tensors.manifest),
        "bytes": sum(simulation.tensors.manifest.sizes),
        "trainer": {**msgspec.to_builtins(simulation.trainer), "ranks": simulation.trainer.ranks},
        "rollout": {**msgspec.to_builtins(simulation.rollout), "workers": len(simulation.plan.fleet)},
        "bucket_bytes": bucket_bytes,
        "rounds": simulation.rounds.count,
        "worker_calls": simulation.worker_calls(),
        "bytes_per_worker": {mode: int(each.max()) for mode, each in simulation.worker_bytes().items()},
        "sender_bytes": {mode: int(each.max()) for mode, each in sent.items()},
        "sender_max_over_mean": {mode: round(float(each.max() / each.mean()), 4) for mode, each in sent.items()},
        "request_bytes": request_bytes(simulation),
        "routes": simulation.plan.routes,
        "plan_hash": simulation.plan.hash,
        "seconds_columns": round(simulation.seconds_columns, 4),
        "seconds_planning": round(simulation.seconds_planning, 4),
        "peak_rss_mib": round(peak_rss_mib(), 1),
    }


def peak_rss_mib() -> float:
    """The most memory that this process ever had resident, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        # Not getrusage: there a process starts with its parent's peak.
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _show(simulation: Simulation, found: dict[str, Any]) -> None:
    from rich.table import Table

    from rankcast.manifest import size

    console = people()
    console.print(
        f"{found['model_type']}: {found['tensors']:,} tensors, {size(found['bytes'])}; "
        f"{found['trainer']['ranks']:,} trainer ranks to {found['rollout']['workers']:,} workers in "
        f"{found['rollout']['engines']:,} engine(s)",
        markup=False,
        soft_wrap=True,
        style="bold",
    )
    if found["left_out"]:
        console.print(f"left out: {found['left_out']}", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("mode")
    for name in ("worker calls", "bytes/worker", "bytes/sender", "sender max/mean", "requests"):
        table.add_column(name, justify="right")
    for mode, calls in found["worker_calls"].items():
        table.add_row(
            mode,
            f"{calls:,}",
            size(found["bytes_per_worker"][mode]),
            size(found["sender_bytes"][mode]),
            f"{found['sender_max_over_mean'][mode]:.2f}",
            size(found["request_bytes"][mode]),
        )
    console.print(table)
    console.print(simulation.plan.explain(), markup=False, soft_wrap=True)
    console.print(
        f"planned in {found['seconds_planning']:.2f} s (columns: {found['seconds_columns']:.2f} s), "
        f"peak memory {found['peak_rss_mib']:.0f} MiB; bytes are those of the busiest worker and trainer rank",
        markup=False,
        soft_wrap=True,
    )
