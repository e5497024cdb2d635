"""The embedded engine's decoder: the mathematics of ``qwen3_moe`` over one worker's parameters.

This module knows how token ids become log-probabilities across the workers of a layout. It must not know how
parameters are filled, nor what starts a worker or asks it for tokens. There is no KV cache: it is small, and meant to
be right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch
from torch.nn import functional

from rankcast.engines.reference.comm import Comm
from rankcast.engines.reference.config import DecoderConfig
from rankcast.engines.reference.layout import WorkerPlace
from rankcast.engines.reference.parameters import ShardedParameters
from rankcast.errors import LimitError


class Completion(msgspec.Struct, frozen=True):
    """Greedily chosen token ids and the log-probability of each, in order."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


class ReferenceModel(ShardedParameters):
    """One worker's share of a ``qwen3_moe`` decoder."""

    inverse_frequencies: torch.Tensor

    def __init__(
        self,
        config: DecoderConfig,
        place: WorkerPlace,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(config, place, dtype, device)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        self.register_buffer("inverse_frequencies", 1.0 / (config.rope_theta**exponents), persistent=False)

    def forward(self, token_ids: torch.Tensor, comm: Comm) -> torch.Tensor | None:
        """Log-probabilities of the next token after each of ``token_ids``.

        ``token_ids``: int64 [T], the same on every worker of the engine, all of whom call this together. Returns
        float32 [T, vocab_size] on the workers of the last pipeline stage, ``None`` on the others. Raises
        ``LimitError`` for an empty sequence, one longer than ``max_position_embeddings``, or a token outside the
        vocabulary.
        """
        self._check_tokens(token_ids)
        with torch.no_grad():
            if self.place.is_first_stage:
                hidden = self._embed(token_ids, comm)
            else:
                hidden = comm.recv_previous((token_ids.shape[0], self.config.hidden_size), self.dtype)
            angles = self._angles(token_ids.shape[0])
            for layer in self.place.layers(self.config):
                hidden = self._layer(layer, hidden, angles, comm)
            if not self.place.is_last_stage:
                comm.send_next(hidden)
                return None
            hidden = self._norm(hidden, "model.norm.weight")
            head = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
            logits = comm.gather_vocab(functional.linear(hidden, self.get_parameter(head)))
            # Padding rows are zeros, not minus infinity: they must not take part in the normalisation.
            return torch.log_softmax(logits[:, : self.config.vocab_size].float(), dim=-1)

    def generate(self, token_ids: Sequence[int], max_new_tokens: int, comm: Comm) -> Completion:
        """Decode greedily, ``max_new_tokens`` tokens behind ``token_ids``; equal on every worker, all of whom call it.

        One worker's choice is followed by the whole engine, so that a last-bit difference between replicas cannot
        send them different ways. Raises ``LimitError`` as ``forward`` does, before the first token, when prompt and
        new tokens together are too long.
        """
        if len(token_ids) + max_new_tokens > self.config.max_position_embeddings or max_new_tokens < 0:
            raise LimitError(
                f"{len(token_ids)} prompt tokens and {max_new_tokens} new ones do not fit in max_position_embeddings = "
                f"{self.config.max_position_embeddings}: ask for fewer"
            )
        device = self.inverse_frequencies.device
        sequence = torch.tensor(list(token_ids), dtype=torch.int64, device=device)
        self._check_tokens(sequence)
        chosen: list[int] = []
        log_probs: list[float] = []
        for _ in range(max_new_tokens):
            scores = self.forward(sequence, comm)
            # float64 holds every token id exactly, and every float32.
            choice = torch.zeros(2, dtype=torch.float64, device=device)
            if scores is not None:
                best = scores[-1].argmax()
                choice = torch.stack([best.double(), scores[-1, best].double()])
            token, log_prob = comm.share_choice(choice).tolist()
            chosen.append(int(token))
            log_probs.append(log_prob)
            sequence = torch.cat([sequence, sequence.new_tensor([int(token)])])
        return Completion(tuple(chosen), tuple(log_probs))

    def _check_tokens(self, token_ids: torch.Tensor) -> None:
        count, limit = token_ids.shape[0], self.config.max_position_embeddings
        if not 1 <= count <= limit:
            raise LimitError(f"a sequence of {count} tokens: it must have 1 to max_position_embeddings = {limit}")
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= self.config.vocab_size:
            raise LimitError(
                f"token ids from {low} to {high}: they must lie in 0 to {self.config.vocab_size - 1} (vocab_size - 1)"
            )

    def _embed(self, token_ids: torch.Tensor, comm: Comm) -> torch.Tensor:
        rows = self.place.vocabulary(self.config)
        local = token_ids - rows.start
        absent = (local < 0) | (local >= len(rows))
        found = functional.embedding(local.masked_fill(absent, 0), self.get_parameter("model.embed_tokens.weight"))
        return comm.all_reduce_tp(found.masked_fill(absent[:, None], 0))

    def _angles(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 1, head_dim] of the rotary embedding, both halves alike."""
        positions = torch.arange(length, dtype=torch.float32, device=self.inverse_frequencies.device)
        half = positions[:, None] * self.inverse_frequencies
        angles = torch.cat([half, half], dim=-1)[:, None, :]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _norm(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return self.get_parameter(name) * (wide * scale).to(hidden.dtype)

    def _layer(
        self, layer: int, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], comm: Comm
    ) -> torch.Tensor:
        prefix = f"model.layers.{layer}"
        normed = self._norm(hidden, f"{prefix}.input_layernorm.weight")
        hidden = hidden + self._attention(f"{prefix}.self_attn", normed, angles, comm)
        normed = self._norm(hidden, f"{prefix}.post_attention_layernorm.weight")
        if self.config.is_sparse(layer):
            return hidden + self._experts(f"{prefix}.mlp", normed, comm)
        return hidden + self._dense_mlp(f"{prefix}.mlp", normed, comm)

    def _attention(
        self, prefix: str, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], comm: Comm
    ) -> torch.Tensor:
        head = self.config.head_dim
        queries, groups = len(self.place.query_heads(self.config)), len(self.place.key_value_heads(self.config))
        bias = self.get_parameter(f"{prefix}.qkv_proj.bias") if self.config.attention_bias else None
        fused = functional.linear(hidden, self.get_parameter(f"{prefix}.qkv_proj.weight"), bias)
        length = hidden.shape[0]
        query, key, value = fused.view(length, queries + 2 * groups, head).split_with_sizes(
            [queries, groups, groups], dim=1
        )
        query = _rotated(self._norm(query, f"{prefix}.q_norm.weight"), angles)
        key = _rotated(self._norm(key, f"{prefix}.k_norm.weight"), angles)
        key, value = (t.repeat_interleave(queries // groups, dim=1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(head)
        future = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(dim=-1, dtype=torch.float32).to(value.dtype)
        mixed = torch.einsum("hqk,khd->qhd", weights, value).reshape(length, queries * head)
        output = self._reduced_tp(functional.linear(mixed, self.get_parameter(f"{prefix}.o_proj.weight")), comm)
        # Every rank holds the whole bias: it is added once, behind the sum.
        return output + self.get_parameter(f"{prefix}.o_proj.bias") if self.config.attention_bias else output

    def _dense_mlp(self, prefix: str, hidden: torch.Tensor, comm: Comm) -> torch.Tensor:
        fused, down = (self.get_parameter(f"{prefix}.{name}.weight") for name in ("gate_up_proj", "down_proj"))
        return self._reduced_tp(_gated_mlp(hidden, fused, down), comm)

    def _experts(self, prefix: str, hidden: torch.Tensor, comm: Comm) -> torch.Tensor:
        config = self.config
        router = functional.linear(hidden, self.get_parameter(f"{prefix}.gate.weight"))
        weights, chosen = router.softmax(dim=-1, dtype=torch.float32).topk(config.num_experts_per_tok, dim=-1)
        if config.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(hidden.dtype)
        w13, w2 = (self.get_parameter(f"{prefix}.experts.{name}") for name in ("w13_weight", "w2_weight"))
        output = torch.zeros_like(hidden)
        for index, expert in enumerate(self.place.experts(config)):
            tokens, slots = torch.where(chosen == expert)
            if len(tokens):
                found = _gated_mlp(hidden[tokens], w13[index], w2[index]) * weights[tokens, slots, None]
                output.index_add_(0, tokens, found)
        if not self.place.layout.expert_parallel:
            return self._reduced_tp(output, comm)
        return comm.all_reduce_ep(output.float()).to(output.dtype)

    def _reduced_tp(self, partial: torch.Tensor, comm: Comm) -> torch.Tensor:
        # Summed in float32, so that half-precision layouts differ from one another as little as can be.
        return comm.all_reduce_tp(partial.float()).to(partial.dtype)


def _gated_mlp(hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = functional.linear(hidden, gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down)


def _rotated(heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding of [T, heads, head_dim], the two halves of a head being the two coordinates."""
    cosine, sine = angles
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine
