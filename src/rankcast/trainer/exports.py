"""What all trainer ranks together export for a push, and where each tensor lies.

This module knows the union of the ranks' manifests, who owns which tensor, the rounds and this rank's staging. It
must not know engines or sessions. Every rank computes owners and rounds alike from the same exchanged records; what
cannot be computed alike (handles) is exchanged, and only when it changed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator

import msgspec
import torch

from rankcast.errors import ManifestError, SourceError, TrainerError
from rankcast.manifest import DTYPES, Manifest, union
from rankcast.plan.rounds import Rounds, assign_owners, cut_rounds
from rankcast.plan.schedule import Placed
from rankcast.trainer.group import TrainerGroup
from rankcast.trainer.sources.base import WeightSource
from rankcast.trainer.sources.exported import Remembered
from rankcast.trainer.staging import BUFFERS, Staging, fills_again, locations
from rankcast.transports.live import SharedMemoryMap, handle_for
from rankcast.transports.segment import OpenedSegment
from rankcast.transports.shm import open_handle
from rankcast.wire.handles import Handle


class _Joined(msgspec.Struct, frozen=True):
    options: str
    manifest: Manifest


class _State(msgspec.Struct, frozen=True):
    """One rank's exports: its buffers, and the tensors that lie in shareable memory already."""

    buffers: tuple[Handle | None, ...] = (None,) * BUFFERS
    handles: tuple[Handle, ...] = ()
    live: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


class _Change(msgspec.Struct, frozen=True):
    """What one rank says at each exchange: which push it makes, whether its staging stands, and its exports where they
    changed."""

    push: int
    version: str
    laid_out: bool
    hash: str
    state: _State | None


class Exports:
    """The trainer ranks' side of a sync that is not about engines."""

    def __init__(self, source: WeightSource, group: TrainerGroup, *, options: str, bucket_bytes: int) -> None:
        """Exchange manifests. Collective over ``group``; raises the same error on every rank.

        ``options`` is what must be equal on all ranks.
        """
        self._source = source
        self._group = group
        self._bucket_bytes = bucket_bytes
        self.staging: Staging | None = None
        self.kind = "shm"
        own = source.manifest()
        own.check()  # a source of the user's own may have built it unchecked, and it must travel
        joined = _Joined(options, own)
        replies = group.exchange(msgspec.msgpack.encode(joined), "manifests")
        all_joined = [msgspec.msgpack.decode(reply, type=_Joined) for reply in replies]
        for rank, other in enumerate(all_joined):
            if other.options != all_joined[0].options:
                raise TrainerError(
                    f"trainer rank {rank} calls connect with {other.options}, rank 0 with {all_joined[0].options}: "
                    "every rank must pass the same options"
                )
        manifests = [other.manifest for other in all_joined]
        self.manifest = union(manifests)
        if not len(self.manifest):
            raise ManifestError("no trainer rank holds any tensor: there is nothing to push")
        self.manifests = manifests
        self._sent = ""
        self._pushes = 0
        self._version = ""
        self._direct: frozenset[str] = frozenset()
        self._stage(self.manifest)

    def narrow(self, direct: Collection[str]) -> None:
        """Stage all tensors but those of ``direct``, which go by the copy program. Every rank must say the same."""
        self._direct = frozenset(direct)
        self._stage(self.manifest.take(i for i, name in enumerate(self.manifest.names) if name not in self._direct))

    def _stage(self, rest: Manifest) -> None:
        self.rest = rest
        self._held = [[rest.index[name] for name in held.names if name in rest.index] for held in self.manifests]
        self._owners = assign_owners(self._held, rest.sizes, names=rest.names)
        holders = Counter(index for held in self._held for index in held)
        #: The tensors of ``rest`` that several ranks hold, as indices.
        self.shared = frozenset(index for index, count in holders.items() if count > 1)
        self._states = [_State() for _ in self.manifests]
        self._rounds: Rounds | None = None
        self._laid_out_for: list[frozenset[int]] | None = None
        self._last: tuple[Placed, tuple[Handle, ...]] | None = None
        self._live: _State | None = None
        self._live_at: tuple[int, ...] = ()
        self._remembered: list[Remembered] = []
        self.forget_exchange()

    @property
    def rounds(self) -> Rounds:
        assert self._rounds is not None, "refresh comes first"
        return self._rounds

    def announce(self, version: str) -> None:
        """This rank begins one more push, of ``version``: every rank must be at the same one."""
        self._pushes += 1
        self._version = version

    def refresh(self, addresses: tuple[int, ...] | None = None) -> tuple[Placed, tuple[Handle, ...]]:
        """Agree on which push this is and where everything lies now. Collective; cheap when nothing moved.

        ``addresses`` are the source's, where they were just asked for. Returns the columns and all segments' handles.
        Raises ``TrainerError``, on every rank, when the ranks do not make the same push.
        """
        live = self._where_live(addresses)
        stands = self._exchange(live)
        lying = [frozenset(state.live) for state in self._states]
        # Laying out is collective: a rank that could not do it the last time has the others do it once more.
        if not stands or lying != self._laid_out_for:
            self._laid_out_for = None  # nothing stands until all of it does, whatever raises on the way
            self._lay_out(lying)
            self._exchange(live)
        return self._placed()

    @property
    def named(self) -> bool:
        """Whether what is exported is opened by a name, which goes once all readers have it open."""
        return self.kind == "shm_name"

    def renew(self) -> tuple[Placed, tuple[Handle, ...]]:
        """Make every rank's buffers anew, for readers that come late. Collective; returns what ``refresh`` does."""
        self._laid_out_for = None
        return self.refresh()

    def unlink(self) -> None:
        """Say that every reader has this rank's buffers open."""
        if self.staging is not None:
            self.staging.unlink()

    def _where_live(self, addresses: tuple[int, ...] | None) -> _State:
        """``_find_live``, or what it found before when the source says that nothing has moved since."""
        if not self._source.stable or self.kind != "shm" or not len(self.rest):
            return _State()
        addresses = self._source.addresses() if addresses is None else addresses
        if self._live is None or not addresses or addresses != self._live_at:
            # Only when it is found is it remembered: a source that raises is asked again.
            self._live = None
            self._live = self._find_live()
            self._live_at = addresses
        return self._live

    def _find_live(self) -> _State:
        """This rank's own tensors that lie in a shareable segment, exported as they lie."""
        shared = SharedMemoryMap()
        handles: dict[Handle, int] = {}
        made: dict[int, int] = {}
        rows: list[tuple[int, int, int]] = []
        storages: dict[int, torch.UntypedStorage] = {}
        for weight in self._source.read():
            if weight.meta.name in self._direct:
                continue
            index = self.rest.index.get(weight.meta.name)
            if index is None or self.rest.row(index) != weight.meta:
                raise SourceError(f"the source yields {weight.meta}, its manifest differs", tensor=weight.meta.name)
            if weight.tensor is not None:
                storage = weight.tensor.untyped_storage()
                storages[storage._cdata] = storage
            if weight.tensor is None or self._owners[index] != self._group.rank or not weight.meta.nbytes:
                continue
            found = shared.find(weight.tensor.data_ptr(), weight.meta.nbytes)
            if found is not None and found.offset % DTYPES[weight.meta.dtype] == 0:
                file = found.descriptor
                if file not in made:
                    made[file] = handles.setdefault(handle_for(found), len(handles))
                rows.append((index, made[file], found.offset))
        # Their addresses are compared at the next push, and must not be given out again until then.
        self._remembered = [Remembered(storage) for storage in storages.values()]
        columns = list(zip(*rows, strict=True)) or [(), (), ()]
        return _State(handles=tuple(handles), live=columns[0], segments=columns[1], offsets=columns[2])

    def _exchange(self, live: _State) -> bool:
        """Say what changed, hear the others; returns whether every rank's staging stands as it was last laid out."""
        buffers = self.staging.handles if self.staging is not None else (None,) * BUFFERS
        state = msgspec.structs.replace(live, buffers=buffers)
        digest = hashlib.blake2b(msgspec.msgpack.encode(state), digest_size=16).hexdigest()
        news = None if digest == self._sent else state
        change = _Change(self._pushes, self._version, self._laid_out_for is not None, digest, news)
        self._sent = digest
        replies = self._group.exchange(msgspec.msgpack.encode(change), "where tensors lie")
        all_said = [msgspec.msgpack.decode(reply, type=_Change) for reply in replies]
        self._check_same_push(all_said)
        for rank, said in enumerate(all_said):
            if said.state is not None:
                self._states[rank] = said.state
                self._last = None
        return all(said.laid_out for said in all_said)

    def _check_same_push(self, all_said: list[_Change]) -> None:
        first = all_said[0]
        for rank, said in enumerate(all_said):
            if (said.push, said.version) != (first.push, first.version):
                # From here on they count alike again.
                self._pushes = max(other.push for other in all_said)
                raise TrainerError(
                    f"trainer rank {rank} pushes {said.version!r}, its push number {said.push}, while rank 0 pushes "
                    f"{first.version!r}, its push number {first.push}: every rank must make the same pushes in the "
                    "same order"
                )

    def forget_exchange(self) -> None:
        """After a push that failed half-way nobody knows who heard what: say everything again at the next."""
        self._sent = ""

    def _lay_out(self, lying: list[frozenset[int]]) -> None:
        held = self._held[self._group.rank]
        self._source.check_whole([self.rest.names[index] for index in held])
        anywhere = frozenset().union(*lying)
        staged = [index not in anywhere for index in range(len(self.rest))]
        self._rounds = cut_rounds(
            self._held, self._owners, self.rest.sizes, staged, self._bucket_bytes, names=self.rest.names
        )
        self._last = None
        if self.staging is not None:
            self.staging.close()
            self.staging = None
        self.staging = Staging(
            self._source,
            self.rest,
            self._rounds,
            rank=self._group.rank,
            held=held,
            owners=self._owners,
            staged=staged,
            bucket_bytes=self._bucket_bytes,
            kind=self.kind,
            passed_over=self._direct,
        )
        self._laid_out_for = lying

    def _placed(self) -> tuple[Placed, tuple[Handle, ...]]:
        if self._last is None:
            self._last = self._place()
        return self._last

    def _place(self) -> tuple[Placed, tuple[Handle, ...]]:
        handles: list[Handle] = []
        buffers: list[int] = []
        live: dict[int, tuple[int, int]] = {}
        for state in self._states:
            for buffer in state.buffers:
                buffers.append(len(handles))
                if buffer is not None:
                    handles.append(buffer)
            base = len(handles)
            handles += state.handles
            for index, segment, offset in zip(state.live, state.segments, state.offsets, strict=True):
                live[index] = (base + segment, offset)
        # A tensor of no bytes needs no memory, but its column needs a segment: any will do, and staging sees to one.
        segments, offsets = locations(self.rounds, self._owners, live, buffers=buffers, bucket_bytes=self._bucket_bytes)
        clamped = tuple(min(segment, len(handles) - 1) for segment in segments)
        return Placed(self.rounds.rounds, clamped, offsets, self.rounds.count), tuple(handles)

    def owned(self, turn: int, rank: int) -> list[str]:
        """The tensors that come with round ``turn`` out of trainer rank ``rank``, by name."""
        return [self.rest.names[index] for index in self._owned(turn, rank)]

    def lying(self, turn: int, rank: int) -> Iterator[torch.Tensor]:
        """The bytes of each of ``owned``, where ``rank`` is this rank and the round is staged."""
        placed, handles = self._placed()
        assert self.staging is not None, "refresh comes first"
        opened: dict[int, OpenedSegment] = {}
        try:
            for index in self._owned(turn, rank):
                memory = self.staging.lying(index)
                size, segment = self.rest.sizes[index], placed.segments[index]
                if memory is None and not size:
                    memory = torch.empty(0, dtype=torch.uint8)
                if memory is None:
                    if segment not in opened:
                        opened[segment] = open_handle(handles[segment])
                    memory = opened[segment].tensor("uint8", (size,), placed.offsets[index])
                yield memory
        finally:
            for one in opened.values():
                one.close()

    def _owned(self, turn: int, rank: int) -> list[int]:
        rounds = self.rounds.rounds
        return [i for i, owner in enumerate(self._owners) if owner == rank and rounds[i] == turn]

    def fills_again(self, turn: int) -> bool:
        """Whether round ``turn`` may be staged only once the round before it is installed everywhere."""
        return fills_again(self.rounds, turn, self._bucket_bytes)

    def staged_bytes(self) -> int:
        """What all ranks together copy into their buffers in one push."""
        return sum(sum(row) for row in self.rounds.buckets)

    def close(self) -> None:
        """Give the buffers back."""
        if self.staging is not None:
            self.staging.close()
            self.staging = None
