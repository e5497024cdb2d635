"""What the server process and a worker process say to each other, one record a kind.

This module knows the records and their bytes (msgpack). It must not know how they travel or what either side does.
The server speaks first; every command has exactly one reply.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import msgspec

from rankcast.engines.reference.layout import Layout
from rankcast.topology import Worker
from rankcast.wire.reports import Fault, Report


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    pass


class Setup(_Message, frozen=True, tag="setup"):
    """Who the worker is to be. Answered by ``Hello``. ``exchange_seconds`` bounds each exchange between workers."""

    checkpoint: str
    layout: Layout
    rank: int
    engine: str
    secret: bytes | None
    exchange_seconds: float


class Join(_Message, frozen=True, tag="join"):
    """Meet the other workers at worker 0's store, then load the checkpoint. Answered by ``Ready``.

    ``port`` is on loopback; an engine of one worker has nobody to meet.
    """

    port: int | None


class Call(_Message, frozen=True, tag="call"):
    """A call of the weight-update protocol, for ``Receiver.handle``. Answered by ``Answer``.

    ``argument`` is JSON: what came over HTTP may hold numbers that msgpack cannot.
    """

    call: str
    argument: bytes


class Step(_Message, frozen=True, tag="step"):
    """One forward pass over these tokens, by all workers at once. Answered by ``Chosen``."""

    token_ids: tuple[int, ...]
    prompt_log_probs: bool = False


class Checksum(_Message, frozen=True, tag="checksum"):
    """What is in the parameters. Answered by ``Checksums``."""


class SetVersion(_Message, frozen=True, tag="set_version"):
    """What the weights are called from now on. Answered by ``Done``."""

    weight_version: str


class Hello(_Message, frozen=True, tag="hello"):
    """Who the worker says it is. ``port`` is the store's, on worker 0 of an engine of several."""

    worker: Worker
    port: int | None = None


class Ready(_Message, frozen=True, tag="ready"):
    """The checkpoint is loaded; the worker serves."""


class Answer(_Message, frozen=True, tag="answer"):
    """What the receiver reported."""

    report: Report


class Chosen(_Message, frozen=True, tag="chosen"):
    """The most probable next token and its log-probability, from the first worker of a replica's last stage.

    The others have no ``token``. ``prompt_log_probs`` has one value for each token of the prompt but the first.
    """

    token: int | None = None
    log_prob: float = 0.0
    prompt_log_probs: tuple[float, ...] = ()


class ParameterChecksum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """SHA-256 (hex) of a parameter's bytes in row-major order, its canonical dtype and its shape on this worker."""

    sha256: str
    dtype: str
    shape: tuple[int, ...]


class Checksums(_Message, frozen=True, tag="checksums"):
    """One row for each parameter, in the model's order."""

    parameters: dict[str, ParameterChecksum]


class Done(_Message, frozen=True, tag="done"):
    """A command that has nothing to tell was done."""


class Failed(_Message, frozen=True, tag="failed"):
    """A command was not done."""

    fault: Fault


Command = Setup | Join | Call | Step | Checksum | SetVersion
Reply = Hello | Ready | Answer | Chosen | Checksums | Done | Failed

T = TypeVar("T")


def encode(message: Command | Reply) -> bytes:
    """The bytes of one message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kinds: Any) -> Any:
    """The message of these bytes, one of ``kinds`` (``Command`` or ``Reply``); raises ``msgspec.DecodeError``."""
    return _decoder(kinds).decode(data)


@functools.cache
def _decoder(kinds: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kinds)
