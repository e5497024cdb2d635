"""Faults put into the library on purpose, by name, to see that the tests notice.

It knows what each mutant breaks. It must not know which test notices it. A mutant is a function that patches objects of
``rankcast`` in the process that calls it; it is never undone, so it belongs in a process of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

MUTANTS: dict[str, Callable[[], None]] = {}


def mutant(apply: Callable[[], None]) -> Callable[[], None]:
    MUTANTS[apply.__name__] = apply
    return apply


# -- the embedded model's loader -------------------------------------------------------------------------------------


def _change_parts(change: Callable[[Any, Any], dict[str, Any]]) -> None:
    """Have the loader use other parts: ``change(config, parts)`` gives them by checkpoint name."""
    from rankcast.engines.reference import parameters, parts

    right = parts.worker_parts

    def wrong(config: Any, place: Any) -> Any:
        held = right(config, place)
        changed = change(config, held.parts)
        shapes = parts.checkpoint_shapes(config)
        return parts.WorkerParts(
            held.parameters,
            changed,
            {name: shapes[name] for name in changed},
            frozenset([*shapes, "lm_head.weight"]) - changed.keys(),
        )

    parameters.worker_parts = wrong


@mutant
def gate_up_swapped() -> None:
    def change(config: Any, parts: dict[str, Any]) -> dict[str, Any]:
        def other(name: str) -> str:
            swapped = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
            return re.sub(r"gate_proj|up_proj", lambda found: swapped[found[0]], name)

        return {name: msgspec.structs.replace(part, target=parts[other(name)].target) for name, part in parts.items()}

    _change_parts(change)


@mutant
def expert_shifted_by_one() -> None:
    def change(config: Any, parts: dict[str, Any]) -> dict[str, Any]:
        def next_one(name: str) -> str:
            return re.sub(r"experts\.(\d+)", lambda m: f"experts.{(int(m[1]) + 1) % config.num_experts}", name)

        return {next_one(name): part for name, part in parts.items()}

    _change_parts(change)


@mutant
def kv_heads_swapped() -> None:
    from rankcast.engines.reference.layout import WorkerPlace

    right = WorkerPlace.key_value_heads

    def wrong(self: Any, config: Any) -> range:
        own = right(self, config)
        return range(config.num_key_value_heads - own.stop, config.num_key_value_heads - own.start)

    WorkerPlace.key_value_heads = wrong  # type: ignore[method-assign]


# -- where bytes lie -------------------------------------------------------------------------------------------------


@mutant
def bucket_takes_one_tensor_too_many() -> None:
    from rankcast.plan import rounds

    right = rounds._fit

    def wrong(fill: dict[int, int], now: int, size: int, bucket_bytes: int) -> tuple[int, int]:
        return right(fill, now, size, bucket_bytes + size)

    rounds._fit = wrong


@mutant
def first_tensor_of_a_bucket_announced_with_the_one_before() -> None:
    from rankcast.trainer.exports import Exports

    right = Exports._placed

    def wrong(self: Any) -> Any:
        placed, handles = right(self)
        rounds = list(placed.rounds)
        for turn in range(1, placed.installs):
            rounds[rounds.index(turn)] = turn - 1
        return msgspec.structs.replace(placed, rounds=tuple(rounds)), handles

    Exports._placed = wrong  # type: ignore[method-assign]


@mutant
def offset_off_by_one_element() -> None:
    from rankcast.transports.segment import OpenedSegment, torch_dtype

    right = OpenedSegment.tensor

    def wrong(self: Any, dtype: str, shape: Any, offset: int, **names: Any) -> Any:
        try:
            return right(self, dtype, shape, offset + torch_dtype(dtype).itemsize, **names)
        except Exception:
            return right(self, dtype, shape, offset, **names)

    OpenedSegment.tensor = wrong  # type: ignore[method-assign]


@mutant
def both_rounds_in_one_buffer() -> None:
    from rankcast.trainer import exports
    from rankcast.trainer.staging import BUFFERS

    right = exports.locations

    def wrong(rounds: Any, owners: Any, live: Any, *, buffers: Any, bucket_bytes: int) -> Any:
        first = [buffers[at - at % BUFFERS] for at in range(len(buffers))]
        return right(rounds, owners, live, buffers=first, bucket_bytes=bucket_bytes)

    exports.locations = wrong


# -- sessions --------------------------------------------------------------------------------------------------------


@mutant
def prepare_not_waited_for() -> None:
    """Installs go out whatever the workers say to prepare."""
    from rankcast.trainer.lead import Lead

    right = Lead.prepare

    def wrong(self: Any, *arguments: Any) -> None:
        refuse, self._raise = self._raise, lambda answer: None
        try:
            right(self, *arguments)
        finally:
            self._raise = refuse

    Lead.prepare = wrong  # type: ignore[method-assign]


@mutant
def install_accepted_before_prepare() -> None:
    from rankcast.session import Session, State

    right = Session.may_install

    def wrong(self: Any, sequence: int) -> bool:
        if self._state is State.STARTED:
            self.prepared(sequence)
        return right(self, sequence)

    Session.may_install = wrong  # type: ignore[method-assign]


@mutant
def published_on_one_attestation() -> None:
    from rankcast.trainer.lead import Lead

    def wrong(self: Any) -> None:
        answer = self._ask("finish", lambda engine: engine.client.finish_weight_update())
        if not any(report.servable and report.attested_version == self._version for _, report in answer.reports):
            self._raise(answer)

    Lead.finish = wrong  # type: ignore[method-assign]


@mutant
def sequence_not_checked() -> None:
    from rankcast.session import Session

    Session.may_install = lambda self, sequence: True  # type: ignore[method-assign]


@mutant
def coverage_not_checked() -> None:
    from rankcast.trace.columns import Trace

    Trace.missing = lambda self, required=None: []  # type: ignore[method-assign]


@mutant
def lease_not_checked() -> None:
    from rankcast.session import Session

    Session.check_lease = lambda self, owner, now: None  # type: ignore[method-assign]


@mutant
def mixed_fleet_resumed() -> None:
    from rankcast.trainer.lead import Lead

    right = Lead.abort

    def wrong(self: Any, reason: str) -> str:
        said = right(self, reason)
        self.serves_old = True
        return said

    Lead.abort = wrong  # type: ignore[method-assign]


@mutant
def served_while_half_written() -> None:
    from rankcast.session import Session

    Session.servable = property(lambda self: True)  # type: ignore[method-assign, assignment]


# -- entries ---------------------------------------------------------------------------------------------------------


@mutant
def addressee_not_checked() -> None:
    from rankcast.rollout import receiver

    receiver.check_addressee = lambda body, worker: None


@mutant
def mac_not_checked() -> None:
    from rankcast.wire.codec import Codec

    Codec._authenticate = lambda self, text, mac, what: None  # type: ignore[method-assign]


@mutant
def list_indexed_within_the_replica() -> None:
    """The formula that a replica created again uses: its data-parallel rank is 0."""
    from rankcast.rollout import receiver

    right = receiver.pick

    def wrong(payload: Any, worker: Any) -> Any:
        if isinstance(payload, list) and len(payload) == worker.workers and worker.dp:
            return payload[worker.rank % 2]
        return right(payload, worker)

    receiver.pick = wrong


def apply(name: str) -> None:
    """Put the mutant called ``name`` into this process; raises KeyError when there is none of this name."""
    MUTANTS[name]()
