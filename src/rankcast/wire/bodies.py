"""The messages from the trainer to workers, one record a kind.

This module knows what each message carries. It must not know how a message is encoded or signed (``codec``), in which
form of payload it travels (``payload``), or what a worker does about it. Bodies of the init route (identify, init,
claim, release) go to every worker of an engine alike; bodies of the update route (prepare, install, abort) are *for*
one worker and say for which, or for all workers of one engine when ``rank`` is ``None``.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rankcast.manifest import Manifest
from rankcast.process import ProcessIdentity
from rankcast.wire.handles import Handle

#: The protocol number of this version; a worker refuses any other.
PROTOCOL = 1


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who holds a fleet: a random id, the process, and a name for people (host name and pid)."""

    id: str
    process: ProcessIdentity
    name: str


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    protocol: int = PROTOCOL


class Identify(_Body, frozen=True, tag="identify"):
    """Asks every worker to report who it is and how it is, to ``report``; changes nothing.

    ``request`` comes back in the reports, so that an asker knows answers to its own question.
    """

    request: str
    report: str


class Init(_Body, frozen=True, tag="init"):
    """Opens a connection: where reports go, and the manifest from which a worker says which names it touches.

    ``probe`` is a small segment; workers report whether they can open it, which tells the trainer how to export. With
    ``wanted`` they also report the boxes that they want. Refused while a session is open whose trainer may be alive.

    ``count`` rises with every init, claim and release of one connection, so that a worker knows a repeated one. Each
    worker answers with a fresh ``nonce``, which the claims of this connection must carry.
    """

    request: str
    report: str
    connection: str
    count: int
    owner: Owner
    manifest: Manifest
    probe: Handle
    wanted: bool = False


class Claim(_Body, frozen=True, tag="claim"):
    """Takes the lease for one session before it starts; a session left open by a dead trainer is aborted.

    ``lease_seconds`` is how long the worker keeps the lease without hearing from its owner. ``nonces`` has, by rank as
    text, what each worker of the engine answered to its init: to a worker that drew another one since, as one that was
    restarted has, this claim is a stranger's, and it only says how it is.
    """

    request: str
    report: str
    connection: str
    count: int
    nonces: Mapping[str, str]
    session: str
    owner: Owner
    lease_seconds: float


class Release(_Body, frozen=True, tag="release"):
    """Gives the lease back at the end of a session, and with ``close`` the connection too.

    ``published`` says that the session's weights have their name on every engine; ``settled`` that nothing which its
    owner paused is left paused, so that there is nothing for the next trainer to clear up.
    """

    request: str
    report: str
    connection: str
    count: int
    owner: Owner
    close: bool = False
    published: bool = False
    settled: bool = False


InitBody = Identify | Init | Claim | Release


class _Entry(_Body, frozen=True):
    session: str
    engine: str
    rank: int | None
    workers: int
    sequence: int
    weight_version: str


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one worker will receive in a session, as columns with one value a tensor.

    ``rounds`` says with which install a tensor comes (0, 1, ...); ``segments`` indexes the handles of the prepare
    message; ``offsets`` are bytes from the start of that segment. Tensors are dense and row-major.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rounds: tuple[int, ...]
    segments: tuple[int, ...]
    offsets: tuple[int, ...]


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one worker copies by itself in the direct mode: its routes, as columns with one value a route.

    ``parameters`` are the names that ``destinations`` index. A route copies a box of ``sizes`` elements of ``dtypes``
    from byte ``addresses`` of segment ``segments`` (an index into the handles of the prepare message), stepping by
    ``source_strides`` elements, to element ``offsets`` of its parameter, stepping by ``strides`` elements.
    """

    parameters: tuple[str, ...]
    destinations: tuple[int, ...]
    offsets: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    segments: tuple[int, ...]
    addresses: tuple[int, ...]
    source_strides: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


class Prepare(_Entry, frozen=True, tag="prepare"):
    """The whole session for this worker, before any data: nothing is written for it.

    ``plan_hash`` names schedule, program and handles together, by ``plan_digest``, which the worker computes as well.
    They are absent when the worker has said that it holds them, so that a message of the steady state is constant in
    size.
    ``installs`` is how many install messages follow; where there is a program the first of them runs it, and the
    schedule's rounds count from there. ``digests`` asks for digests of what each install brings.
    """

    connection: str
    mode: str
    transport: str
    installs: int
    plan_hash: str
    schedule: Schedule | None
    handles: tuple[Handle, ...] | None
    program: Program | None = None
    digests: bool = False


class Install(_Entry, frozen=True, tag="install"):
    """The tensors of ``round`` lie ready where the schedule says. Constant in size."""

    round: int


class Abort(_Entry, frozen=True, tag="abort"):
    """Ends the session. Before the first write the old weights stay; after it the worker is unusable."""

    reason: str


EntryBody = Prepare | Install | Abort


def kind_of(body: InitBody | EntryBody) -> str:
    """The kind of a message, as it travels."""
    return str(body.__struct_config__.tag)
