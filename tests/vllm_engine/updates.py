"""Weight updates over HTTP by a client that knows nothing of rankcast's own sessions: bare entries, whole or damaged.

It knows the seed's form of an entry and vLLM's routes; it must not know what a test expects of a fault. One segment
holds a whole checkpoint for as long as the test runs; entries are cut from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from rankcast.transports.shm import create_segment
from vllm_engine.models import weights_of
from vllm_engine.servers import VllmServer

Entry = dict[str, Any]
_ALIGNMENT = 64


@dataclass(frozen=True)
class Source:
    """A checkpoint's tensors in shared memory: where each lies, and the record with which a worker opens it."""

    handle: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    offsets: dict[str, int]

    def entry(self, names: Iterable[str] | None = None) -> Entry:
        """A bare entry of ``names`` (default: all)."""
        chosen = list(self.tensors if names is None else names)
        return {
            "names": chosen,
            "dtype_names": ["bfloat16"] * len(chosen),
            "shapes": [list(self.tensors[name].shape) for name in chosen],
            "segments": [self.handle],
            "locations": [[0, self.offsets[name]] for name in chosen],
        }

    def without(self, *absent: str) -> Entry:
        return self.entry(name for name in self.tensors if name not in absent)


@contextmanager
def shared_source(family: str, which: str) -> Iterator[Source]:
    """Checkpoint ``which`` of ``family`` in a segment that lives as long as the context."""
    tensors = weights_of(family, which)
    offsets, end = {}, 0
    for name, tensor in tensors.items():
        offsets[name] = end
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    with create_segment(end) as segment:
        for name, tensor in tensors.items():
            at = offsets[name]
            segment.memory[at : at + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
        yield Source(msgspec.to_builtins(segment.handle), tensors, offsets)


def bare_update(server: VllmServer, *payloads: object) -> None:
    """Start, every payload, finish: each must be taken."""
    for route, body in (
        ("/start_weight_update", None),
        *(("/update_weights", {"update_info": payload}) for payload in payloads),
        ("/finish_weight_update", None),
    ):
        reply = server.post(route, body)
        assert reply.status_code == 200, f"{route}: {reply.text}"
