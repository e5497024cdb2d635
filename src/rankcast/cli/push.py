"""``rankcast push``: a checkpoint directory into running engines, without a trainer.

This module knows the command's options and how a push report reads. It must not know how a push runs.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankcast.cli import options
from rankcast.cli.output import people, reported, write_json

if TYPE_CHECKING:
    from rankcast.telemetry.report import PushReport


class Mode(StrEnum):
    """What moves."""

    AUTO = "auto"
    DIRECT = "direct"
    RANKLOCAL = "ranklocal"
    BROADCAST = "broadcast"


class Pause(StrEnum):
    """How generation is paused around the update."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"
    NONE = "none"


def push(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A safetensors checkpoint directory, or one such file.")
    ],
    urls: options.Urls,
    mode: Annotated[Mode, typer.Option(help="What each worker is sent.")] = Mode.AUTO,
    bucket: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of each of the two staging buffers: 512MiB, 1g, 64k, bytes.")
    ] = "512MiB",
    weight_version: Annotated[
        str | None, typer.Option(metavar="V", help="What the weights are called; by default the directory's name.")
    ] = None,
    pause: Annotated[Pause, typer.Option(help="What becomes of requests that are running.")] = Pause.KEEP,
    header: options.Headers = None,
    listen: options.Listen = None,
    timeout: Annotated[float, typer.Option(metavar="S", help="Seconds without progress before a wait fails.")] = 300.0,
    tls_verify: options.TlsVerify = True,
    json: options.Json = False,
) -> None:
    """Push a safetensors checkpoint into running engines, all at once and all or none.

    A secret is taken from RANKCAST_SECRET or RANKCAST_SECRET_FILE. Exits with 0 when every engine serves the new
    weights, else with 1: the message says what they serve.
    """
    headers = options.parse_headers(header)
    bucket_bytes = options.parse_size(bucket, "--bucket")
    with reported(json):
        version = weight_version if weight_version is not None else version_of(checkpoint)
        from rankcast.telemetry.line import live_line
        from rankcast.trainer.connect import connect
        from rankcast.trainer.sources import SafetensorsSource

        line = live_line()
        try:
            with connect(
                urls,
                SafetensorsSource(checkpoint),
                mode=mode.value,
                bucket_bytes=bucket_bytes,
                pause=None if pause is Pause.NONE else pause.value,
                headers=headers,
                tls_verify=tls_verify,
                listen=listen,
                timeout=timeout,
                progress=line,
            ) as sync:
                report = sync.push(weight_version=version)
        finally:
            line.clear()
        if json:
            write_json(report)
        else:
            _show(report)


def version_of(checkpoint: Path) -> str:
    """The weight version of a checkpoint without one: the directory's name, or a single file's without its ending.

    ``model.safetensors`` says nothing, so then the directory around it counts. Links are not followed: ``latest`` is
    what the caller called it.
    """
    path = checkpoint.absolute()
    if path.name == "model.safetensors":
        path = path.parent
    if path.name == "..":
        path = path.resolve()
    return path.name.removesuffix(".safetensors") or str(path)


def _show(report: PushReport) -> None:
    from rich.table import Table

    from rankcast.manifest import size

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("engine", overflow="fold")
    for name in ("worker", "dp", "pp", "tp", "tensors", "bytes", "seconds"):
        table.add_column(name, justify="right")
    for row in report.workers:
        numbers = (row.rank, row.dp, row.pp, row.tp, f"{row.tensors:,}", size(row.nbytes), f"{row.seconds:.2f}")
        table.add_row(row.where, *map(str, numbers))
    console = people()
    console.print(table)
    console.print(
        f"{report.weight_version!r} is published: {report.tensors:,} tensors ({report.mode}), {size(report.nbytes)} "
        f"to {len(report.workers)} workers in {report.rounds} rounds, {report.seconds:.2f} s",
        markup=False,
        soft_wrap=True,
    )
