"""Where a worker stands in an engine, and which share of each dimension is its own.

This module knows tensor, pipeline, data and expert parallelism as vLLM counts and divides them. It must not know
tensor names, other than in the words of an error, nor torch.
"""

from __future__ import annotations

import msgspec

from rankcast.engines.reference.config import DecoderConfig
from rankcast.errors import UnsupportedError

#: The vocabulary is padded to a multiple of this before it is divided.
VOCAB_PADDING = 64


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many ways an engine divides its model.

    With ``expert_parallel`` whole experts are spread over the DP x TP workers of a pipeline stage; without it every
    worker holds a slice of every expert, cut as TP cuts a dense MLP.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp) < 1:
            raise UnsupportedError(f"a layout of tp={self.tp}, pp={self.pp}, dp={self.dp}: each must be at least 1")

    @property
    def workers(self) -> int:
        """Workers of the engine, over all data-parallel replicas."""
        return self.tp * self.pp * self.dp

    def place(self, rank: int) -> WorkerPlace:
        """The place of the worker with this rank in the engine."""
        return WorkerPlace(self, rank)


class WorkerPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker of a layout; ``rank`` = dp_index * (pp * tp) + pp_index * tp + tp_index."""

    layout: Layout
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.layout.workers:
            raise UnsupportedError(f"worker rank {self.rank} is not one of the {self.layout.workers} of {self.layout}")

    @property
    def dp_index(self) -> int:
        return self.rank // (self.layout.pp * self.layout.tp)

    @property
    def pp_index(self) -> int:
        return self.rank // self.layout.tp % self.layout.pp

    @property
    def tp_index(self) -> int:
        return self.rank % self.layout.tp

    @property
    def ep_size(self) -> int:
        """Over how many workers whole experts are spread; 1 when they are not."""
        return self.layout.dp * self.layout.tp if self.layout.expert_parallel else 1

    @property
    def ep_rank(self) -> int:
        return self.dp_index * self.layout.tp + self.tp_index if self.layout.expert_parallel else 0

    @property
    def is_first_stage(self) -> bool:
        return self.pp_index == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_index == self.layout.pp - 1

    @property
    def label(self) -> str:
        """How messages name this worker."""
        return (
            f"worker {self.rank} of {self.layout.workers} (dp {self.dp_index}, pp {self.pp_index}, tp {self.tp_index})"
        )

    def layers(self, config: DecoderConfig) -> range:
        """The decoder layers of this worker's pipeline stage."""
        counts = stage_layer_counts(config.num_hidden_layers, self.layout.pp)
        start = sum(counts[: self.pp_index])
        return range(start, start + counts[self.pp_index])

    def experts(self, config: DecoderConfig) -> range:
        """The experts of which this worker holds weights: its own when spread, otherwise all."""
        least, extra = divmod(config.num_experts, self.ep_size)
        start = self.ep_rank * least + min(self.ep_rank, extra)
        return range(start, start + least + (self.ep_rank < extra))

    def query_heads(self, config: DecoderConfig) -> range:
        return self.divided(config.num_attention_heads)

    def key_value_heads(self, config: DecoderConfig) -> range:
        """This worker's key and value heads; with fewer heads than TP ranks, neighbours hold the same one."""
        heads, tp = config.num_key_value_heads, self.layout.tp
        if heads >= tp:
            return self.divided(heads)
        head = self.tp_index * heads // tp
        return range(head, head + 1)

    def divided(self, size: int) -> range:
        """This TP rank's equal share of a dimension."""
        share = size // self.layout.tp
        return range(self.tp_index * share, (self.tp_index + 1) * share)

    def expert_intermediate(self, config: DecoderConfig) -> range:
        """The part of an expert's intermediate dimension that this worker holds."""
        if self.layout.expert_parallel:
            return range(config.moe_intermediate_size)
        return self.divided(config.moe_intermediate_size)

    def vocabulary(self, config: DecoderConfig) -> range:
        """This TP rank's rows of the padded vocabulary; those from ``config.vocab_size`` on are padding."""
        return self.divided(padded_vocabulary(config, self.layout))


def padded_vocabulary(config: DecoderConfig, layout: Layout) -> int:
    """Rows of the embedding over all TP ranks: rounded up to a multiple of 64, and then of ``tp``."""
    rows = -(-config.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
    return -(-rows // layout.tp) * layout.tp


def stage_layer_counts(layers: int, pp: int) -> tuple[int, ...]:
    """How many layers each pipeline stage has.

    Equal counts; a remainder goes one each to the stages before the last, counted backwards from the last but one,
    because the last stage also has the norm and the head.
    """
    counts = [layers // pp] * pp
    for back in range(2, layers % pp + 2):
        counts[-back] += 1
    return tuple(counts)


def check_layout(config: DecoderConfig, layout: Layout) -> None:
    """Raise ``UnsupportedError`` unless ``layout`` can divide a model of ``config``; the message says by what."""
    tp, heads, groups = layout.tp, config.num_attention_heads, config.num_key_value_heads
    if heads % tp:
        raise UnsupportedError(f"tp={tp} does not divide num_attention_heads = {heads}: choose a tp that does")
    if groups % tp and tp % groups:
        raise UnsupportedError(
            f"tp={tp} neither divides nor is a multiple of num_key_value_heads = {groups}: key and value heads would "
            "be cut apart; choose a tp that is"
        )
    sparse = config.sparse_layers
    if sparse and not layout.expert_parallel and config.moe_intermediate_size % tp:
        raise UnsupportedError(
            f"tp={tp} does not divide moe_intermediate_size = {config.moe_intermediate_size}: choose a tp that does, "
            "or expert_parallel"
        )
    if len(sparse) < config.num_hidden_layers and config.intermediate_size % tp:
        raise UnsupportedError(
            f"tp={tp} does not divide intermediate_size = {config.intermediate_size}: choose a tp that does"
        )
    if layout.pp > config.num_hidden_layers:
        raise UnsupportedError(
            f"pp={layout.pp} exceeds num_hidden_layers = {config.num_hidden_layers}: a stage would be empty"
        )
