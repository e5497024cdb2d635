"""The model that the demo trains: a ``qwen3_moe`` decoder of which each trainer rank holds its own experts.

This module knows the mathematics and the checkpoint names. It must not know processes, optimizers or where weights go.
Parameters that are no expert's are the same on every rank, and stay so bit for bit: their gradients are computed from
values that are equal on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional

from rankcast.cli.demo.expert_sum import Reduce, alone, copied_to_ranks, summed_over_ranks
from rankcast.engines.reference.config import DecoderConfig


class TrainedModel(nn.Module):
    """One trainer rank's part; the names of its parameters are those of the checkpoint.

    ``experts`` are the global indices that this rank holds; with ``alone``, all of them, and nobody to sum with.
    """

    def __init__(self, config: DecoderConfig, experts: Iterable[int], reduce: Reduce = alone) -> None:
        super().__init__()
        self.model = _Decoder(config, tuple(experts), reduce)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Log-probabilities float32 [B, T, vocab_size] of the next token; ``token_ids`` int64 [B, T].

        A collective: every rank calls it with the same tokens, and calls backward if one does.
        """
        return torch.log_softmax(self.lm_head(self.model(token_ids)).float(), dim=-1)

    def loss(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of each token after those before it; ``token_ids`` int64 [B, T], T at least 2."""
        scores = self(token_ids[:, :-1])
        return functional.nll_loss(scores.flatten(0, 1), token_ids[:, 1:].flatten())


class _Decoder(nn.Module):
    def __init__(self, config: DecoderConfig, experts: tuple[int, ...], reduce: Reduce) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, experts, reduce) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._half = config.head_dim // 2
        self._theta = config.rope_theta

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(token_ids)
        frequencies = self._theta ** (-torch.arange(self._half, dtype=torch.float32) / self._half)
        angles = torch.arange(token_ids.shape[1], dtype=torch.float32)[:, None] * frequencies
        rotation = torch.polar(torch.ones_like(angles), angles)
        for layer in self.layers:
            hidden = layer(hidden, rotation)
        normed: torch.Tensor = self.norm(hidden)
        return normed


class _Layer(nn.Module):
    def __init__(self, config: DecoderConfig, experts: tuple[int, ...], reduce: Reduce) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = _Experts(config, experts, reduce)

    def forward(self, hidden: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation)
        added: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return added


class _Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, self._head = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * self._head, config.num_key_value_heads * self._head
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.q_norm = nn.RMSNorm(self._head, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self._head, eps=config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        query = _rotated(self.q_norm(self._heads(self.q_proj(hidden))), rotation)
        key = _rotated(self.k_norm(self._heads(self.k_proj(hidden))), rotation)
        value = self._heads(self.v_proj(hidden))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        output: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _heads(self, wide: torch.Tensor) -> torch.Tensor:
        return wide.view(*wide.shape[:-1], -1, self._head).transpose(1, 2)


class _Experts(nn.Module):
    def __init__(self, config: DecoderConfig, experts: tuple[int, ...], reduce: Reduce) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleDict({str(expert): _Expert(config) for expert in experts})
        self._held = experts
        self._reduce = reduce
        self._chosen = config.num_experts_per_tok
        self._normed = config.norm_topk_prob

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, -2)
        weights, chosen = self.gate(tokens).softmax(dim=-1, dtype=torch.float32).topk(self._chosen, dim=-1)
        if self._normed:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        # Both reach the loss through every rank's experts, so the gradients of both are sums over the ranks.
        tokens, weights = copied_to_ranks(self._reduce, tokens, weights)
        partial = torch.zeros_like(tokens)
        for index, expert in zip(self._held, self.experts.values(), strict=True):
            # Also without a token: the graph, and with it the collectives of its backward, is the same on every rank.
            rows, slots = torch.where(chosen == index)
            partial = partial.index_add(0, rows, expert(tokens[rows]) * weights[rows, slots, None])
        return summed_over_ranks(self._reduce, partial).view_as(hidden)


class _Expert(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.moe_intermediate_size, config.hidden_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(tokens)) * self.up_proj(tokens))
        return output


def _rotated(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [B, heads, T, head_dim], the two halves of a head being the two coordinates."""
    first, second = heads.chunk(2, dim=-1)
    cosine, sine = rotation.real, rotation.imag
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
