"""``rankcast demo``: what happens in which order.

This module knows the story: a fleet, trainer ranks, a training step and a push in turn, a check after every push. It
must not know how weights are compared, shown or moved. It loads no torch: whatever does runs in another process.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from rankcast.cli.demo import messages
from rankcast.cli.demo.checkpoint import CONFIG, write_checkpoint
from rankcast.cli.demo.display import Display, print_outcome
from rankcast.cli.demo.processes import Children
from rankcast.cli.demo.summary import FleetFacts, ModeSummary, Outcome, TrainerFacts, mode_summary
from rankcast.cli.demo.verify import Finding, Verifier, read_held
from rankcast.control.http import HttpClient
from rankcast.engines.reference.layout import Layout
from rankcast.errors import RankcastError, UnsupportedError
from rankcast.telemetry.report import PushReport

MODES = ("broadcast", "ranklocal", "direct")
#: ``auto`` goes direct in all of this fleet, and would only repeat that row: it is there for who asks for it.
KNOWN_MODES = (*MODES, "auto")
LAYOUT = Layout(tp=2, dp=2, expert_parallel=True)
RANKS = 2
#: Small, so that a push takes several rounds.
BUCKET_BYTES = 4 * 2**20
#: How long a child may say nothing, in seconds.
PATIENCE = 120.0

_FLEET = "the fleet"


def demo(*, json: bool = False, steps: int = 3, modes: Sequence[str] | None = None, keep: bool = False) -> int:
    """Run the demo; returns the exit code, 0 only when everything was verified.

    ``modes``: which of ``KNOWN_MODES``, in this order (default: ``MODES``); ``steps``: training steps, and pushes, in
    each. ``json`` prints one object, an ``Outcome``, and nothing else on standard output. ``keep`` leaves the fleet
    running afterwards until interrupted. Raises ``UnsupportedError`` for a mode there is not, or no steps;
    ``RankcastError``, with the last lines that it wrote, when a process of the demo ends or falls silent.
    """
    wanted = tuple(modes or MODES)
    unknown = [mode for mode in wanted if mode not in KNOWN_MODES]
    if unknown or len(set(wanted)) != len(wanted):
        raise UnsupportedError(f"modes {', '.join(wanted)}: each may be one of {', '.join(KNOWN_MODES)}, once")
    if steps < 1:
        raise UnsupportedError(f"{steps} steps: there must be at least one")
    display = Display()
    with (
        _terminable(),
        tempfile.TemporaryDirectory(prefix="rankcast-demo-") as folder,
        Children(Path(folder)) as children,
    ):
        scene = _Scene(Path(folder), children, display)
        with display.running():
            outcome = scene.play(wanted, steps)
        if json:
            print(msgspec.json.encode(outcome).decode(), flush=True)
        else:
            print_outcome(outcome)
        if keep:
            scene.keep()
    return 0 if outcome.verified else 1


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the demo as an interrupt does, so that its children are ended too."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Scene:
    """The processes of one demo, and what is done with them."""

    def __init__(self, folder: Path, children: Children, display: Display) -> None:
        self._folder = folder
        self._children = children
        self._display = display
        self._ranks = [f"trainer rank {rank}" for rank in range(RANKS)]
        self._url = ""
        self._losses: list[float] = []
        self._differences: list[str] = []

    def play(self, modes: Sequence[str], steps: int) -> Outcome:
        """Everything from the first process to the last comparison."""
        began = time.monotonic()
        self._display.doing("writing a checkpoint")
        checkpoint = write_checkpoint(self._folder / "checkpoint")
        self._start(checkpoint)
        before, _ = read_held([checkpoint])
        with HttpClient(self._url, timeout=PATIENCE) as engine:
            verifier = Verifier(engine, CONFIG, LAYOUT, before)
            summaries: dict[str, ModeSummary] = {}
            findings: list[Finding] = []
            for mode in modes:
                reports, found = self._push_all(mode, steps, verifier)
                summaries[mode] = mode_summary(reports, found)
                findings += found
        self._children.end(*self._ranks)
        return Outcome(
            verified=not self._differences,
            differences=tuple(self._differences),
            compared_parameters=findings[-1].parameters,
            compared_bytes=findings[-1].nbytes,
            fleet=FleetFacts(engines=1, workers=LAYOUT.workers, layout=LAYOUT),
            trainer=TrainerFacts(
                ranks=RANKS,
                experts_per_rank=CONFIG["num_experts"] // RANKS,
                tensors=len(before),
                nbytes=sum(bits.nbytes for bits in before.values()),
            ),
            steps=steps,
            losses=tuple(self._losses),
            seconds=time.monotonic() - began,
            modes=summaries,
        )

    def keep(self) -> None:
        """Leave the fleet running until interrupted."""
        self._display.say(
            f"The fleet keeps running at {self._url}, its first checkpoint is {self._folder / 'checkpoint'}.\n"
            f"  rankcast status {self._url}\n"
            f"  rankcast push {self._folder / 'checkpoint'} {self._url}\n"
            "Ctrl-C ends it."
        )
        try:
            self._children.wait()
        except KeyboardInterrupt:
            self._display.say("ended")

    # -- processes ---------------------------------------------------------------------------------------------------

    def _start(self, checkpoint: Path) -> None:
        """Start the fleet and the trainer ranks at once, and wait until all of them are ready."""
        self._display.doing(f"starting {LAYOUT.workers} workers and {RANKS} trainer ranks")
        serve = ["-m", "rankcast", "reference-server", str(checkpoint), "--json", "--port", "0"]
        serve += ["--dp", str(LAYOUT.dp), "--tp", str(LAYOUT.tp), "--pp", str(LAYOUT.pp)]
        serve += ["--expert-parallel"] if LAYOUT.expert_parallel else []
        self._children.start(_FLEET, serve)
        for rank, name in enumerate(self._ranks):
            self._children.start(name, ["-m", "rankcast.cli.demo.trainer", str(rank), str(RANKS), str(checkpoint)])
        port: int | None = None
        while port is None or not self._url:
            name, line = self._children.hear(PATIENCE, "the fleet and the trainer ranks to start")
            if name == _FLEET:
                self._url = msgspec.json.decode(line)["url"]
                self._display.say(f"A fleet of {LAYOUT.workers} workers serves at {self._url}")
            else:
                event = messages.decode(line, messages.Event)
                if isinstance(event, messages.Listening):
                    port = event.port
        self._everyone(messages.Meet(port=port), "the trainer ranks to meet")

    def _everyone(self, command: messages.Command, awaited: str) -> dict[str, messages.Answer]:
        """Give every trainer rank a command; their answers by name, once all have answered."""
        line = messages.encode(command)
        for name in self._ranks:
            self._children.tell(name, line)
        answers: dict[str, messages.Answer] = {}
        while len(answers) < len(self._ranks):
            name, said = self._children.hear(PATIENCE, awaited)
            if name not in self._ranks:
                continue
            event = messages.decode(said, messages.Event)
            if isinstance(event, messages.Moving):
                self._display.moving(event)
            elif isinstance(event, messages.Done | messages.Stepped):
                answers[name] = event
        return answers

    # -- pushes ------------------------------------------------------------------------------------------------------

    def _push_all(self, mode: str, steps: int, verifier: Verifier) -> tuple[list[PushReport], list[Finding]]:
        """One connection, and ``steps`` times a training step, a push and a check."""
        self._display.doing(f"{mode}: connecting")
        connect = messages.Connect(url=self._url, mode=mode, bucket_bytes=BUCKET_BYTES)
        self._everyone(connect, f"the trainer ranks to connect in mode {mode}")
        reports, findings = [], []
        for step in range(1, steps + 1):
            version = f"{mode}-{step}"
            folder = self._folder / "held" / version
            self._display.doing(f"push {version}: a training step")
            command = messages.Step(weight_version=version, folder=str(folder))
            said = self._everyone(command, f"the push of {version}")[self._ranks[0]]
            if not isinstance(said, messages.Stepped):
                raise RankcastError(f"{self._ranks[0]} answered a step with {type(said).__name__}")
            self._display.doing(f"push {version}: comparing with the oracle")
            folders = [folder / f"rank{rank}" for rank in range(RANKS)]
            finding = verifier.check(version, folders, said.probe_tokens, said.log_probs)
            self._display.pushed(said.loss, said.report, finding)
            self._losses.append(said.loss)
            self._differences += finding.differences
            reports.append(said.report)
            findings.append(finding)
            shutil.rmtree(folder)
        self._everyone(messages.Close(), f"the trainer ranks to close their connection in mode {mode}")
        return reports, findings
