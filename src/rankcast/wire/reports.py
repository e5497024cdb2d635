"""The records that workers send back to the trainer.

This module knows what a worker says after a call. It must not know how a report travels or what the trainer concludes.
"""

from __future__ import annotations

import msgspec

from rankcast.errors import RankcastError, error_for, travelling
from rankcast.manifest import Manifest
from rankcast.topology import Worker
from rankcast.wire.bodies import PROTOCOL

#: The calls of which only faults are reported: each follows one that all workers report, and changes no weights.
UNREPORTED = ("start", "release")


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that is wrong: the stable code of its error class, the message, and the tensor it is about, if any."""

    code: str
    message: str
    tensor: str | None = None

    @classmethod
    def of(cls, error: BaseException, *, other: str = "internal") -> Fault:
        """A fault from an exception; ``other`` is the code of anything that is not rankcast's own."""
        if isinstance(error, RankcastError):
            tensor = None if error.tensor is None else travelling(error.tensor)
            return cls(error.code, travelling(error.message), tensor)
        return cls(other, travelling(f"{type(error).__name__}: {error}"))


def error_of(fault: Fault, *, worker: str | None = None) -> RankcastError:
    """The error that a fault came from, for raising it on another process; unknown codes give the base class."""
    return error_for(fault.code)(fault.message, tensor=fault.tensor, worker=worker)


class Touched(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker's own loader does with the tensors of an init manifest, as indices into it.

    ``names`` are copied from into parameters; ``ignored`` the loader passes over on purpose. ``missing`` says in words
    which parameters would stay incomplete, by at most ten lines, and ``missing_count`` how many there are.
    ``untouched`` names the persistent buffers that no tensor fills: they keep what they have, and say so here.
    """

    names: tuple[int, ...]
    ignored: tuple[int, ...]
    missing: tuple[str, ...] = ()
    missing_count: int = 0
    untouched: tuple[str, ...] = ()


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which boxes of which tensors a worker wants, and where they go, as columns with one value a destination.

    ``parameters`` are the worker's own names, dtypes and shapes; ``destinations`` index them, ``tensors`` the manifest
    of the init. ``starts`` and ``sizes`` are boxes in checkpoint coordinates; ``offsets`` and ``strides`` count
    elements of the parameter, strides one for each checkpoint dimension. ``reasons`` pairs a tensor's index with why it
    goes through the loader instead; ``casts`` pairs one with the parameter's dtype, where that differs from the
    manifest's: only a copy program may cast. ``whole_modules`` says that all tensors of a module must go the same way.
    """

    parameters: Manifest
    tensors: tuple[int, ...]
    destinations: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    reasons: tuple[tuple[int, str], ...] = ()
    casts: tuple[tuple[int, str], ...] = ()
    whole_modules: bool = False


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one worker answers to one call, or to an identify.

    ``call`` is the kind that was handled (``identify``, ``init``, ``claim``, ``release``, ``start``, ``prepare``,
    ``install``, ``abort``, ``finish``, ``disown``; ``update`` for an entry that is bare or could not be read).
    ``session`` and ``sequence`` are those of the call, ``request`` that of an init message. ``state`` and ``servable``
    are the worker's after the call; ``generation`` counts the sessions it completed since its process began;
    ``connection`` and ``plan_hash`` are what it still holds, and ``nonce`` what claims of that connection must carry.
    ``weight_version`` is the published name of its weights, ``attested_version`` what the last session that completed
    was prepared as; each is empty when the weights have no such name. ``tensors`` and ``nbytes`` count what this call
    read. ``opened`` says whether the probe of an init could be opened, ``unreachable`` why not. ``ended`` says that
    this call ended a session which its trainer had left open, or a claim that it never gave back. ``orphaned`` says
    that some trainer's claim ended so, or was aborted, and that it never said that nothing was left paused; it stays
    set until one does. ``unpublished`` says that these weights came by a trainer's session that was complete here, and
    of which it never said that it was complete everywhere. ``wrote`` says of a finish that the session gave this worker
    its weights, and is true as well where there is no parameter to give any to. ``digests`` has, where prepare asked
    for them, those of what an install brought: one for each route of the program, or for each tensor of the round, in
    their order (``transports.digest``).
    """

    protocol: int = PROTOCOL
    request: str = ""
    session: str = ""
    call: str
    sequence: int = -1
    worker: Worker
    state: str
    servable: bool
    generation: int
    weight_version: str = ""
    attested_version: str = ""
    connection: str = ""
    nonce: str = ""
    plan_hash: str = ""
    faults: tuple[Fault, ...] = ()
    repeated: bool = False
    ended: bool = False
    orphaned: bool = False
    unpublished: bool = False
    wrote: bool = False
    tensors: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    opened: bool | None = None
    unreachable: str = ""
    touched: Touched | None = None
    wanted: Wanted | None = None
    unsent: int = 0
    digests: str = ""
