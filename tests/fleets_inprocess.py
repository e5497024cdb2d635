"""Fleets of receivers inside the test's own process, made for a config and a layout, and compared with the oracle.

It knows how receivers, a watched client and a session made by hand are put together. It must not know what any test
expects of them, and it says nothing about what a worker must hold: that is the oracle's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import msgspec
import numpy as np
import torch
from torch import nn

from checkpoints import as_torch, bits_of
from oracle import compare, worker_parameters
from rankcast import Receiver, Worker
from rankcast.engines.reference.config import parse_config
from rankcast.engines.reference.decoder import ReferenceModel
from rankcast.engines.reference.layout import Layout
from rankcast.process import this_process
from rankcast.rollout.installer import LoaderInstaller
from rankcast.topology import new_engine_id
from rankcast.wire.codec import Codec
from rankcast.wire.payload import is_own

Bits = np.ndarray[Any, Any]
Weights = Mapping[str, Bits]
Held = list[dict[str, Bits]]


class Fleet:
    """The workers of one engine: models, receivers and what they must hold.

    ``installer`` makes the installer of a worker of some rank from its model, for tests that break one.
    """

    def __init__(
        self,
        config: dict[str, Any],
        layout: Layout | None = None,
        *,
        secret: str | None = None,
        installer: Callable[[int, ReferenceModel], LoaderInstaller] | None = None,
    ) -> None:
        self.config = config
        self.layout = layout or Layout()
        self.engine = new_engine_id()
        self.models: list[ReferenceModel] = []
        self.receivers: list[Receiver] = []
        parsed = parse_config(config)
        for rank in range(self.layout.workers):
            place = self.layout.place(rank)
            model = ReferenceModel(parsed, place)
            worker = Worker(
                engine=self.engine,
                rank=rank,
                workers=self.layout.workers,
                dp=place.dp_index,
                pp=place.pp_index,
                tp=place.tp_index,
                ep=place.ep_rank,
                process=this_process(),
            )
            made = installer(rank, model) if installer else LoaderInstaller(model, may_ignore=_tied_head(config))
            self.models.append(model)
            self.receivers.append(Receiver(model, worker=worker, installer=made, secret=secret))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()

    def differences(self, weights: Weights) -> list[str]:
        """How the workers differ from what the oracle says they must hold of ``weights``; empty when they do not."""
        lines = []
        for rank, model in enumerate(self.models):
            held = {name: bits_of(parameter) for name, parameter in model.named_parameters()}
            expected = worker_parameters(weights, self.config, self.layout, rank)
            lines += [f"worker {rank}: {line}" for line in compare(expected, held)]
        return lines

    def bits(self) -> Held:
        """Every worker's every parameter and buffer, by rank."""
        return [all_bits(model) for model in self.models]

    def changed(self, before: Held) -> list[int]:
        """The ranks that hold other bits than ``before``."""
        return [rank for rank, model in enumerate(self.models) if compare(before[rank], all_bits(model))]

    @property
    def servable(self) -> list[bool]:
        return [receiver.servable for receiver in self.receivers]

    @property
    def versions(self) -> set[str]:
        return {receiver.weight_version for receiver in self.receivers}

    def load(self, weights: Weights) -> None:
        """Put ``weights`` into every worker directly, as an engine does when it starts."""
        for model in self.models:
            model.load_weights(as_torch(weights, self.config["dtype"]).items())


def all_bits(model: nn.Module) -> dict[str, Bits]:
    """Parameters and buffers of ``model``, as bits."""
    return {name: bits_of(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _tied_head(config: Mapping[str, Any]) -> Callable[[str], bool]:
    return lambda name: bool(config["tie_word_embeddings"]) and name == "lm_head.weight"


class Trained(nn.Module):
    """A plain trainer's module whose parameters go by checkpoint names."""

    def __init__(self, weights: Weights, dtype: str) -> None:
        super().__init__()
        for name, tensor in as_torch(weights, dtype).items():
            *path, last = name.split(".")
            module: nn.Module = self
            for step in path:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module._modules[step]  # type: ignore[assignment]  # never None: just made
            module.register_parameter(last, nn.Parameter(tensor, requires_grad=False))

    def become(self, weights: Weights) -> None:
        """Take other values, in place, as an optimizer's step does."""
        own = dict(self.named_parameters())
        for name, bits in weights.items():
            own[name].view(torch.uint8).reshape(-1).copy_(torch.from_numpy(bits.reshape(-1).view(np.uint8)))


class WatchedClient:
    """An engine's client over receivers of this process, with every optional call; writes down what it is asked.

    ``log`` gets (name, call) when a call comes, and (name, call + " answered") when it is over; update calls go by the
    kind of their entries. ``change`` may give another payload in place of the one that came, for calls of any kind.
    ``fail`` maps a call to an error to raise in place of making it.
    """

    def __init__(
        self,
        receivers: Sequence[Receiver],
        *,
        name: str = "engine",
        log: list[tuple[str, str]] | None = None,
        change: Callable[[str, Any], Any] | None = None,
    ) -> None:
        self.receivers = list(receivers)
        self.name = name
        self.log = log if log is not None else []
        self.change = change
        self.fail: dict[str, Exception] = {}
        self.paused = False
        self.weight_version = ""
        self.payloads: list[tuple[str, Any]] = []
        self.before: dict[str, Callable[[], None]] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._each(kind_in(init_info), init_info, lambda receiver, info: receiver.init_weight_transfer_engine(info))

    def start_weight_update(self) -> None:
        self._each("start", None, lambda receiver, _: receiver.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        self._each(kind_in(update_info), update_info, lambda receiver, payload: receiver.update_weights(payload))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._each("finish", None, lambda receiver, _: receiver.finish_weight_update())

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        self._each("pause", None, lambda receiver, _: None)
        self.paused = True

    def resume(self) -> None:
        self._each("resume", None, lambda receiver, _: None)
        self.paused = False

    def is_paused(self) -> bool:
        return self.paused

    def update_weight_version(self, weight_version: str) -> None:
        self._each("version", None, lambda receiver, _: None)
        self.weight_version = weight_version

    def _each(self, call: str, payload: Any, act: Callable[[Receiver, Any], None]) -> None:
        self.log.append((self.name, call))
        if call in self.before:
            self.before[call]()
        if call in self.fail:
            raise self.fail[call]
        if self.change is not None:
            payload = self.change(call, payload)
        self.payloads.append((call, payload))
        for receiver in self.receivers:
            act(receiver, payload)
        self.log.append((self.name, f"{call} answered"))


def kind_in(payload: Any) -> str:
    """The kind of a sealed message, or of the entries of a payload."""
    if is_own(payload):
        payload = next(iter(payload["entries"].values()))
    if isinstance(payload, list):
        payload = payload[0]
    if isinstance(payload, dict) and "body" in payload:
        return str(msgspec.json.decode(payload["body"])["kind"])
    return "bare"


def opened(entry: Mapping[str, str]) -> dict[str, Any]:
    """An entry's body as plain data."""
    return dict(msgspec.json.decode(entry["body"]))


def closed(body: Mapping[str, Any], secret: str | None = None) -> dict[str, str]:
    """The entry of a body given as plain data."""
    text = msgspec.json.encode(body).decode()
    if secret is None:
        return {"body": text}
    return {"body": text, "mac": Codec(secret.encode())._mac(text)}


class OneValue(nn.Module):
    """The smallest model: one parameter, which shows whose entry came."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((1,), -1.0), requires_grad=False)


class Stream:
    """A function that yields a checkpoint's tensors, and may be told to misbehave at one of them.

    ``odd`` maps a position to what to do there: an exception to raise, or a (name, tensor) to yield in its place;
    ``None`` leaves the tensor out.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights = dict(weights)
        self.odd: dict[int, Exception | tuple[str, torch.Tensor] | None] = {}
        self.passes = 0

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        for position, item in enumerate(self.weights.items()):
            given = self.odd.get(position, item)
            if isinstance(given, Exception):
                raise given
            if given is not None:
                yield given


class Failing(LoaderInstaller):
    """An installer whose loader raises while ``armed``: after ``tensors`` tensors of a session, or in ``stage``."""

    def __init__(self, model: nn.Module, *, after: int = 0, stage: str = "install") -> None:
        super().__init__(model)
        self.armed = False
        self.after = after
        self.stage = stage
        self.seen = 0
        self.entered = threading.Event()

    def begin(self) -> None:
        self.seen = 0
        self._maybe("begin")

    def install(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().install(self._counted(weights))

    def finish(self) -> None:
        self._maybe("finish")

    def _counted(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for item in weights:
            if self.seen >= self.after:
                self._maybe("install")
            self.seen += 1
            yield item

    def _maybe(self, stage: str) -> None:
        if self.armed and stage == self.stage:
            self.entered.set()
            raise RuntimeError(f"the loader broke in {stage}")
