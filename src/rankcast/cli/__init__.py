"""The ``rankcast`` command: one app, one file for each command.

This module knows which commands there are and how the command begins and ends. It must not load what a command needs
before that command runs: ``--help`` loads neither torch nor an engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankcast.cli import options
from rankcast.cli.output import people, reported
from rankcast.cli.plan import plan
from rankcast.cli.push import push
from rankcast.cli.status import status

app = typer.Typer(
    name="rankcast",
    help="Rank-local weight updates: each rollout worker gets the weights it owns.",
    no_args_is_help=True,
    add_completion=False,
    # A failure that is not rankcast's own is a bug: show Python's traceback, which holds no local values.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> int:
    """Run the command line of this process; returns its exit code."""
    try:
        app()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        people().print(str(end.code), markup=False)
        return 1
    return 0


def _version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("rankcast")
    except PackageNotFoundError:  # run from a checkout that is not installed
        found = "(not installed)"
    print(f"rankcast {found}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("push")(push)
app.command("status")(status)
app.command("plan")(plan)


@app.command("reference-server")
def _reference_server(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A qwen3_moe checkpoint directory.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel workers of a pipeline stage.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel replicas.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="Spread experts over all workers of a pipeline stage.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address; another than loopback needs a secret.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")] = 8000,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout once it answers.")] = False,
) -> None:
    """Serve CHECKPOINT from an embedded fleet of worker processes, on vLLM's routes for weight updates.

    Prints its URL once it answers, and runs until Ctrl-C. A secret is taken from RANKCAST_SECRET or
    RANKCAST_SECRET_FILE.
    """
    with reported(json):
        from rankcast.cli.reference_server import reference_server

        reference_server(
            checkpoint, tp=tp, dp=dp, pp=pp, expert_parallel=expert_parallel, host=host, port=port, json=json
        )


@app.command("demo")
def _demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps, each followed by a push, in every mode.")] = 3,
    mode: Annotated[
        list[str] | None,
        typer.Option(metavar="MODE", help="Only this mode, also auto; repeatable."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the fleet running afterwards, until Ctrl-C.")] = False,
    json: options.Json = False,
) -> None:
    """A small sharded trainer pushes every step into a running fleet, and each worker is checked bit for bit.

    Exits with 0 only when every worker of the fleet held exactly what it should after every push.
    """
    with reported(json):
        from rankcast.cli.demo.command import demo

        raise typer.Exit(demo(json=json, steps=steps, modes=mode, keep=keep))
