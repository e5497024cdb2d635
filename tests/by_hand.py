"""Sessions made by hand, message by message, over receivers of the test's own process.

It knows how a message is put together that a worker would take. What a test makes of it, and expects, it must not know.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import msgspec
import torch

from rankcast import Receiver
from rankcast.manifest import Manifest, TensorMeta
from rankcast.process import this_process
from rankcast.transports.segment import Segment
from rankcast.transports.shm import create_segment
from rankcast.wire.bodies import Abort, Claim, Init, Install, Owner, Prepare, Release, Schedule
from rankcast.wire.codec import Codec
from rankcast.wire.payload import own_payload
from rankcast.wire.plan_digest import plan_digest
from rankcast.wire.reports import Report


class ByHand:
    """A trainer made by hand: a whole checkpoint in one segment, and each message of a session as a test wants it.

    Every call goes to all receivers and returns their reports, by rank. Tensors come in ``installs`` rounds of about
    equally many.
    """

    def __init__(
        self,
        receivers: Sequence[Receiver],
        weights: Mapping[str, torch.Tensor],
        *,
        secret: str | None = None,
        installs: int = 2,
    ) -> None:
        self.receivers = list(receivers)
        self.codec = Codec(None if secret is None else secret.encode())
        self.segment, self.offsets = packed(weights)
        self.manifest = manifest_of(weights)
        self.owner = Owner(secrets.token_hex(16), this_process(), "the trainer made by hand")
        self.connection = secrets.token_hex(16)
        self.session = secrets.token_hex(16)
        self.installs = installs
        self.nonces: dict[str, str] = {}
        self._counts = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.segment.close()

    def init_body(self, **changes: Any) -> Init:
        body = Init(
            request="r",
            report="",
            connection=self.connection,
            count=next(self._counts),
            owner=self.owner,
            manifest=self.manifest,
            probe=self.segment.handle,
        )
        return msgspec.structs.replace(body, **changes)

    def claim_body(self, lease_seconds: float = 60.0, **changes: Any) -> Claim:
        body = Claim(
            request="r",
            report="",
            connection=self.connection,
            count=next(self._counts),
            nonces=dict(self.nonces),
            session=self.session,
            owner=self.owner,
            lease_seconds=lease_seconds,
        )
        return msgspec.structs.replace(body, **changes)

    def release_body(self, **changes: Any) -> Release:
        body = Release(
            request="r", report="", connection=self.connection, count=next(self._counts), owner=self.owner, settled=True
        )
        return msgspec.structs.replace(body, **changes)

    def say(self, body: msgspec.Struct) -> list[Report]:
        """One message of the init route to all of them."""
        return [receiver.handle("init", self.codec.seal(body)) for receiver in self.receivers]

    def init(self, **changes: Any) -> list[Report]:
        reports = self.say(self.init_body(**changes))
        self.nonces = {str(report.worker.rank): report.nonce for report in reports}
        return reports

    def claim(self, lease_seconds: float = 60.0, **changes: Any) -> list[Report]:
        return self.say(self.claim_body(lease_seconds, **changes))

    def release(self, **changes: Any) -> list[Report]:
        return self.say(self.release_body(**changes))

    def start(self) -> list[Report]:
        return [receiver.handle("start") for receiver in self.receivers]

    def finish(self) -> list[Report]:
        return [receiver.handle("finish") for receiver in self.receivers]

    def open(self) -> None:
        """Everything up to the start of a session, which must go well."""
        for reports in (self.init(), self.claim(), self.start()):
            assert not [report.faults for report in reports if report.faults]

    def schedule(self) -> Schedule:
        count = len(self.manifest)
        return Schedule(
            names=self.manifest.names,
            dtypes=self.manifest.dtypes,
            shapes=self.manifest.shapes,
            rounds=tuple(index * self.installs // count for index in range(count)),
            segments=(0,) * count,
            offsets=tuple(self.offsets[name] for name in self.manifest.names),
        )

    def prepare_body(self, receiver: Receiver, **changes: Any) -> Prepare:
        body = Prepare(
            session=self.session,
            engine=receiver.worker.engine,
            rank=receiver.worker.rank,
            workers=receiver.worker.workers,
            sequence=0,
            weight_version="by hand",
            connection=self.connection,
            mode="ranklocal",
            transport="shm",
            installs=self.installs,
            plan_hash="",
            schedule=self.schedule(),
            handles=(self.segment.handle,),
        )
        body = msgspec.structs.replace(body, **changes)
        if not body.plan_hash and body.schedule is not None and body.handles is not None:
            digest = plan_digest(body.schedule, body.program, body.handles)
            body = msgspec.structs.replace(body, plan_hash=digest)
        return body

    def install_body(self, receiver: Receiver, sequence: int, **changes: Any) -> Install:
        body = Install(
            session=self.session,
            engine=receiver.worker.engine,
            rank=receiver.worker.rank,
            workers=receiver.worker.workers,
            sequence=sequence,
            weight_version="by hand",
            round=sequence - 1,
        )
        return msgspec.structs.replace(body, **changes)

    def abort_body(self, receiver: Receiver) -> Abort:
        return Abort(
            session=self.session,
            engine=receiver.worker.engine,
            rank=receiver.worker.rank,
            workers=receiver.worker.workers,
            sequence=-1,
            weight_version="by hand",
            reason="the test says so",
        )

    def send(self, body: Callable[[Receiver], msgspec.Struct]) -> list[Report]:
        """One payload of rankcast's own, with the entry ``body(receiver)`` for each."""
        return self.deliver(own_payload({r.worker.rank: self.codec.seal(body(r)) for r in self.receivers}))

    def deliver(self, payload: Any) -> list[Report]:
        return [receiver.handle("update", payload) for receiver in self.receivers]

    def prepare(self, **changes: Any) -> list[Report]:
        return self.send(lambda receiver: self.prepare_body(receiver, **changes))

    def install(self, sequence: int, **changes: Any) -> list[Report]:
        return self.send(lambda receiver: self.install_body(receiver, sequence, **changes))

    def bare(self, names: Iterable[str] | None = None, **changes: Any) -> dict[str, Any]:
        """An entry in the seed's form with the tensors of ``names`` (default: all)."""
        rows = [row for row in self.manifest.rows() if names is None or row.name in set(names)]
        return {
            "names": [row.name for row in rows],
            "dtype_names": [row.dtype for row in rows],
            "shapes": [list(row.shape) for row in rows],
            "segments": [msgspec.to_builtins(self.segment.handle)],
            "locations": [[0, self.offsets[row.name]] for row in rows],
            **changes,
        }


def manifest_of(weights: Mapping[str, torch.Tensor]) -> Manifest:
    return Manifest.of(
        TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in weights.items()
    )


def packed(weights: Mapping[str, torch.Tensor]) -> tuple[Segment, dict[str, int]]:
    """One segment with every tensor of ``weights``, and the byte at which each starts."""
    offsets: dict[str, int] = {}
    end = 0
    for name, tensor in weights.items():
        offsets[name] = -(-end // 64) * 64
        end = offsets[name] + math.prod(tensor.shape) * tensor.itemsize
    segment = create_segment(end)
    for name, tensor in weights.items():
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        segment.memory[offsets[name] : offsets[name] + len(data)].copy_(data)
    return segment, offsets


def codes(reports: Sequence[Report]) -> list[tuple[str, ...]]:
    """The codes of each report's faults."""
    return [tuple(fault.code for fault in report.faults) for report in reports]
