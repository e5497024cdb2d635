"""What the demo says to its trainer ranks and what they answer, one JSON line each.

This module knows the records. It must not know how lines travel or what either side does. Every rank gets every
command, in the same order, and answers each with one ``Answer``; rank 0 tells of progress in between. A trainer rank
leaves when its commands end.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rankcast.telemetry.report import PushReport


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    pass


class Meet(_Message, frozen=True, tag="meet"):
    """Join the other ranks at the store that rank 0 listens with, on loopback."""

    port: int


class Connect(_Message, frozen=True, tag="connect"):
    """Connect to the fleet at ``url``; the connection before is closed by then."""

    url: str
    mode: str
    bucket_bytes: int


class Step(_Message, frozen=True, tag="step"):
    """Train one step, save what this rank holds into ``folder`` (for verification only), and push it."""

    weight_version: str
    folder: str


class Close(_Message, frozen=True, tag="close"):
    """Close the connection."""


class Listening(_Message, frozen=True, tag="listening"):
    """Rank 0's store listens on this port of loopback. Rank 0 says it once, unasked, before anything else."""

    port: int


class Done(_Message, frozen=True, tag="done"):
    """A command is done that has nothing more to tell."""


class Stepped(_Message, frozen=True, tag="stepped"):
    """A step was trained and pushed. ``log_probs``: of each token of ``probe_tokens`` but the first, after the step."""

    loss: float
    probe_tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    report: PushReport


class Moving(_Message, frozen=True, tag="moving"):
    """How far the push is: bytes that workers were told to read."""

    weight_version: str
    stage: str
    round: int
    rounds: int
    done: int
    total: int


Command = Meet | Connect | Step | Close
Answer = Done | Stepped
Event = Listening | Done | Stepped | Moving


def encode(message: Command | Event) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes, kinds: Any) -> Any:
    """The message of a line, one of ``kinds`` (``Command`` or ``Event``); raises ``msgspec.DecodeError``."""
    return msgspec.json.decode(line, type=kinds)
