"""The hash under which trainer and worker know one share: computed by both, so that neither takes it on trust.

This module knows which parts of a prepare message belong together. It must not know how a share is cut, or what a
worker makes of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from rankcast.wire.bodies import Program, Schedule
from rankcast.wire.handles import Handle


def plan_digest(schedule: Schedule, program: Program | None, handles: Sequence[Handle]) -> str:
    """What ``Prepare.plan_hash`` must be for these three."""
    state = hashlib.blake2b(digest_size=16)
    for part in (schedule, program, tuple(handles)):
        state.update(msgspec.json.encode(part))
    return state.hexdigest()
