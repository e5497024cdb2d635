"""How trainer ranks find each other: from a torch process group to a ``TrainerGroup``.

This module knows ``torch.distributed`` and addresses. It must not know what the ranks say to each other. The process
group is used once, for a few bytes as tensors; afterwards a rank that dies or hangs can hold nobody up in a collective.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from rankcast.errors import TrainerError, UnsupportedError
from rankcast.trainer.group_base import SingleGroup, TrainerGroup
from rankcast.trainer.group_link import Frame, Link, Peer, this_peer
from rankcast.trainer.group_star import StarGroup

__all__ = ["SingleGroup", "StarGroup", "TrainerGroup", "form_group"]

_LOOPBACK = "127.0.0.1"


class _Place(msgspec.Struct, frozen=True):
    """Where a rank is: who it is, its network namespace, and an address at which other hosts may know it."""

    peer: Peer
    network: str
    address: str


class _Invitation(msgspec.Struct, frozen=True):
    """Where rank 0 listens and with which key; ``error`` says why it does not."""

    host: str = ""
    port: int = 0
    key: bytes = b""
    error: str = ""


def form_group(group: object | None = None, *, timeout: float) -> TrainerGroup:
    """The trainer group of ``group``, a ``torch.distributed`` process group; every rank of it calls this.

    ``None`` is torch's default group when there is one, else this process alone. Of a group without a CPU backend
    (NCCL only), a gloo group is made for the purpose. ``timeout`` is in seconds without progress, for every wait of the
    trainer group and for forming it. Raises ``UnsupportedError`` when ``group`` is something else, and ``TrainerError``
    when this process is no member, or the ranks do not all get through to rank 0.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return SingleGroup()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise UnsupportedError(
            f"group is a {type(group).__name__}; it must be a torch.distributed process group (of a DeviceMesh: "
            "mesh.get_group()), or None for the default one"
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise TrainerError("this process is no member of the process group that was given as group")
    if size == 1:
        return SingleGroup()
    try:
        with _cpu_group(group, timeout) as usable:
            return _star(usable, rank, size, timeout)
    except (RuntimeError, OSError, EOFError, msgspec.MsgspecError) as fault:
        # torch raises RuntimeError for every trouble of a collective.
        raise TrainerError(f"trainer rank {rank} of {size} could not join the other ranks: {fault}") from fault


@contextlib.contextmanager
def _cpu_group(group: dist.ProcessGroup | None, timeout: float) -> Iterator[dist.ProcessGroup | None]:
    """``group`` itself when it can move CPU tensors, else a gloo group of its ranks."""
    if "cpu:" in dist.get_backend_config(group):
        yield group
        return
    everyone = group is None or group is dist.group.WORLD
    made: Any = dist.new_group(
        None if group is None else dist.get_process_group_ranks(group),
        timeout=timedelta(seconds=timeout),
        backend="gloo",
        use_local_synchronization=not everyone,
    )
    yield made
    # A group that not all ranks made is named by its ranks alone: destroyed, its successor would meet its old keys.
    if everyone:
        dist.destroy_process_group(made)


def _star(group: dist.ProcessGroup | None, rank: int, size: int, timeout: float) -> StarGroup:
    deadline = time.monotonic() + timeout
    if dist.get_backend(group) == "gloo":
        # Names who is missing, within the timeout; the collectives below would wait for as long as the group says.
        dist.monitored_barrier(group, timeout=timedelta(seconds=timeout), wait_all_ranks=True)
    mine = _Place(this_peer(rank), _network(), _own_address())
    places = [msgspec.msgpack.decode(place, type=_Place) for place in _share(msgspec.msgpack.encode(mine), size, group)]
    if rank == 0:
        return _lead(group, places, timeout, deadline)
    source = 0 if group is None else dist.get_global_rank(group, 0)
    invitation = msgspec.msgpack.decode(_broadcast(None, source, group), type=_Invitation)
    if invitation.error:
        raise TrainerError(f"trainer rank 0 cannot take the other ranks' connections: {invitation.error}")
    return _follow(invitation, mine.peer, size, timeout, deadline)


def _lead(group: dist.ProcessGroup | None, places: Sequence[_Place], timeout: float, deadline: float) -> StarGroup:
    source = 0 if group is None else dist.get_global_rank(group, 0)
    try:
        host = _address_facing(places)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family, backlog=len(places))
    except OSError as fault:
        _broadcast(msgspec.msgpack.encode(_Invitation(error=str(fault))), source, group)
        raise
    with server:
        invitation = _Invitation(host, server.getsockname()[1], secrets.token_bytes(32))
        _broadcast(msgspec.msgpack.encode(invitation), source, group)
        links: dict[int, Link] = {}
        try:
            while len(links) < len(places) - 1:
                peer = _admit(server, invitation.key, timeout, deadline, links)
                if peer is None:
                    absent = [place.peer.label for place in places[1:] if place.peer.rank not in links]
                    raise TrainerError(
                        f"{', '.join(absent)} did not reach {places[0].peer.label} at {host} within {timeout:g} s: is "
                        "there a firewall between them?"
                    )
            peers = [place.peer for place in places]
            for link in links.values():
                link.send(Frame(0, "welcome", data=msgspec.msgpack.encode(peers)))
        except BaseException:
            for link in links.values():
                link.close()
            raise
    return StarGroup(0, links, peers, timeout=timeout)


def _admit(server: socket.socket, key: bytes, timeout: float, deadline: float, links: dict[int, Link]) -> int | None:
    """Take one more rank's connection into ``links``; ``None`` when none came in time. Strangers are sent away."""
    while True:
        server.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            opened, _ = server.accept()
        except TimeoutError:
            return None
        link = Link(opened, timeout)
        try:
            link.authenticate(key, listening=True)
            rank = msgspec.msgpack.decode(link.receive(timeout).data, type=Peer).rank
            links[rank] = link
            return rank
        except Exception:  # whatever a stranger says
            link.close()


def _follow(invitation: _Invitation, me: Peer, size: int, timeout: float, deadline: float) -> StarGroup:
    opened = socket.create_connection((invitation.host, invitation.port), timeout=timeout)
    link = Link(opened, timeout)
    try:
        link.authenticate(invitation.key, listening=False)
        link.send(Frame(0, "hello", data=msgspec.msgpack.encode(me)))
        welcome = link.receive(max(deadline - time.monotonic(), 0.0) + 1.0)
        peers = msgspec.msgpack.decode(welcome.data, type=list[Peer])
    except BaseException:
        link.close()
        raise
    assert len(peers) == size
    return StarGroup(me.rank, {0: link}, peers, timeout=timeout)


def _share(data: bytes, size: int, group: dist.ProcessGroup | None) -> list[bytes]:
    """Everyone's ``data`` in rank order: lengths first, then all padded to the longest."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)], dtype=torch.int64), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
    shared = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(shared, padded, group=group)
    return [row.numpy().tobytes()[: int(length)] for row, length in zip(shared, lengths, strict=True)]


def _broadcast(data: bytes | None, source: int, group: dist.ProcessGroup | None) -> bytes:
    length = torch.tensor([len(data or b"")], dtype=torch.int64)
    dist.broadcast(length, source, group=group)
    row = torch.zeros(int(length), dtype=torch.uint8)
    if data is not None:
        row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(row, source, group=group)
    return row.numpy().tobytes()


def _network() -> str:
    """The name of this process's network namespace: only within one do processes share a loopback."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return "unknown"


def _own_address() -> str:
    """An address of this host at which others may reach it: the one that faces the trainer's rendezvous."""
    for target in (os.environ.get("MASTER_ADDR"), socket.gethostname()):
        if target:
            with contextlib.suppress(OSError):
                return _address_towards(target)
    return _LOOPBACK


def _address_facing(places: Sequence[_Place]) -> str:
    """Rank 0's address for all ranks: loopback when all share it, else the one that faces the first that does not."""
    own = places[0]
    for place in places[1:]:
        if (place.peer.process.host, place.network) != (own.peer.process.host, own.network):
            return _address_towards(place.address)
    return _LOOPBACK


def _address_towards(target: str) -> str:
    """The local address from which packets to ``target`` would leave; sends none."""
    family, kind, protocol, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
