"""One request for tokens: what may be asked, what came of it, and how it is answered.

This module knows prompts and their limits. It must not know workers, whose turn it is, or HTTP.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from rankcast.engines.reference.config import DecoderConfig
from rankcast.engines.reference.layout import Layout
from rankcast.errors import LimitError, PayloadError, RankcastError


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a caller wants: ``max_tokens`` greedily chosen tokens behind ``token_ids``.

    All replicas compute every forward pass; ``replica`` says whose choice counts. Tokens in ``stop_token_ids``, and
    unless ``ignore_eos`` the checkpoint's own end tokens, end the request.
    """

    token_ids: tuple[int, ...]
    max_tokens: int = 16
    replica: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    prompt_logprobs: bool = False

    def check(self, config: DecoderConfig, layout: Layout) -> None:
        """Raise ``LimitError`` for a prompt that does not fit the model, ``PayloadError`` for a replica not there."""
        limit, vocabulary = config.max_position_embeddings, config.vocab_size
        if self.max_tokens < 1 or not self.token_ids or len(self.token_ids) + self.max_tokens > limit:
            raise LimitError(
                f"a prompt of {len(self.token_ids)} tokens and max_tokens = {self.max_tokens}: each must be at least 1 "
                f"and both together at most max_position_embeddings = {limit}"
            )
        odd = next((token for token in self.token_ids if not 0 <= token < vocabulary), None)
        if odd is not None:
            raise LimitError(f"token id {odd} in the prompt: ids must lie in 0 to {vocabulary - 1} (vocab_size - 1)")
        if not 0 <= self.replica < layout.dp:
            raise PayloadError(f"replica {self.replica} was asked for: it must lie in 0 to {layout.dp - 1} (dp - 1)")


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What a request got: one value for each new token in ``token_ids``, ``log_probs`` and ``weight_versions``.

    ``weight_versions`` says which weights the forward pass of each token ran on. ``finish_reason`` is ``length``,
    ``stop`` or ``abort``. ``prompt_log_probs`` has one value for each prompt token but the first, when asked for.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    weight_versions: tuple[str, ...]
    finish_reason: str
    prompt_log_probs: tuple[float, ...] | None = None


class Request:
    """One request on its way; ``sequence`` is the prompt and the tokens so far, ``future`` takes a ``Generation``.

    ``wants_prompt`` says that the next pass is to give the prompt's log-probs too. Whoever asked sets ``abandoned``
    when nobody wants the answer any more.
    """

    def __init__(self, ask: Ask, end_tokens: frozenset[int] = frozenset()) -> None:
        self.sequence = ask.token_ids
        self.replica = ask.replica
        self.wants_prompt = ask.prompt_logprobs
        self.future: Future[Generation] = uncancelled()
        self.abandoned = False
        self.arrived = time.monotonic()
        self._ask = ask
        self._stops = frozenset(ask.stop_token_ids) | (frozenset() if ask.ignore_eos else end_tokens)
        self._prompt_log_probs: tuple[float, ...] | None = None
        self._log_probs: list[float] = []
        self._versions: list[str] = []

    def took(self, token: int, log_prob: float, prompt_log_probs: tuple[float, ...], version: str) -> str | None:
        """Note one pass's outcome; the reason to finish, if there is one."""
        if self.wants_prompt:
            self._prompt_log_probs, self.wants_prompt = prompt_log_probs, False
        self.sequence = (*self.sequence, token)
        self._log_probs.append(log_prob)
        self._versions.append(version)
        if token in self._stops:
            return "stop"
        return "length" if len(self._log_probs) >= self._ask.max_tokens else None

    def end(self, reason: str) -> None:
        """Answer with what there is."""
        if not self.future.done():
            self.future.set_result(
                Generation(
                    token_ids=self.sequence[len(self._ask.token_ids) :],
                    log_probs=tuple(self._log_probs),
                    weight_versions=tuple(self._versions),
                    finish_reason=reason,
                    prompt_log_probs=self._prompt_log_probs,
                )
            )

    def fail(self, error: RankcastError) -> None:
        """Answer with an error."""
        if not self.future.done():
            self.future.set_exception(error)


def end_tokens(checkpoint: str | Path) -> frozenset[int]:
    """The ids that end a generation, from ``eos_token_id`` of the generation config, or else of the config."""
    for name in ("generation_config.json", "config.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found = msgspec.json.decode((Path(checkpoint) / name).read_bytes(), type=dict[str, Any]).get("eos_token_id")
            if found is not None:
                return frozenset(msgspec.convert(found if isinstance(found, list) else [found], list[int]))
    return frozenset()


def uncancelled() -> Future[Any]:
    """A future that only the fleet's thread completes: a waiter that goes away cannot cancel it under its hands."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
