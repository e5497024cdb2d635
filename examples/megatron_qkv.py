"""Declare what Megatron's tensor-parallel ranks hold, so that no weight is gathered or re-packed to be pushed.

Megatron keeps attention's three projections in one matrix, interleaved by query group: for each group its query heads,
then its key head, then its value head. It keeps an MLP's gate and up projections in one matrix, gate above up. Both are
cut over tensor-parallel ranks by rows. A checkpoint has q, k, v, gate and up as matrices of their own; every part of
them that a rank holds is a view of its fused matrix. This example makes two ranks' fused matrices out of plain tensors
(it needs no Megatron), declares the views, and checks them against slices written by hand.

    python examples/megatron_qkv.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rankcast.trainer.sources import Declared, DeclaredSource

TP = 2
GROUPS, QUERIES, HEAD = 4, 3, 8  # 12 query heads, 3 to a group; a group has one key and one value head
HIDDEN, FFN = 32, 48
LAYER = "model.layers.0"


def declared_qkv(fused: torch.Tensor, tp_rank: int) -> Iterator[Declared]:
    """The q, k and v boxes inside a rank's ``linear_qkv.weight``, [groups of the rank x (QUERIES + 2) x HEAD, HIDDEN].

    Key heads of two groups are not neighbours in the fused matrix, and neither are the queries of two groups: so there
    is one declaration for each group and projection.
    """
    mine = GROUPS // TP
    by_group = fused.view(mine, (QUERIES + 2) * HEAD, HIDDEN)
    for local in range(mine):
        group = tp_rank * mine + local
        first = 0
        for projection, heads in (("q_proj", QUERIES), ("k_proj", 1), ("v_proj", 1)):
            rows = heads * HEAD
            yield Declared(
                f"{LAYER}.self_attn.{projection}.weight",
                full_shape=(GROUPS * rows, HIDDEN),
                box=((group * rows, (group + 1) * rows), (0, HIDDEN)),
                tensor=by_group[local, first : first + rows],
            )
            first += rows


def declared_mlp(fused: torch.Tensor, tp_rank: int) -> Iterator[Declared]:
    """The gate and up boxes inside a rank's ``linear_fc1.weight``, [2 x FFN / TP, HIDDEN]: each rank cuts both."""
    rows = FFN // TP
    for projection, view in zip(("gate_proj", "up_proj"), fused.view(2, rows, HIDDEN), strict=True):
        yield Declared(
            f"{LAYER}.mlp.{projection}.weight",
            full_shape=(FFN, HIDDEN),
            box=((tp_rank * rows, (tp_rank + 1) * rows), (0, HIDDEN)),
            tensor=view,
        )


def megatron_shards(checkpoint: dict[str, torch.Tensor], tp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What Megatron would hold on one rank: row by row, by hand, so that it is independent of the declarations."""
    q, k, v = (checkpoint[f"{LAYER}.self_attn.{name}_proj.weight"] for name in "qkv")
    rows = []
    for group in range(tp_rank * GROUPS // TP, (tp_rank + 1) * GROUPS // TP):
        for head in range(group * QUERIES, (group + 1) * QUERIES):
            rows += [q[head * HEAD + row] for row in range(HEAD)]
        rows += [k[group * HEAD + row] for row in range(HEAD)]
        rows += [v[group * HEAD + row] for row in range(HEAD)]
    gate, up = (checkpoint[f"{LAYER}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    cut = slice(tp_rank * FFN // TP, (tp_rank + 1) * FFN // TP)
    return torch.stack(rows), torch.cat([gate[cut], up[cut]])


def main() -> None:
    shapes = {
        f"{LAYER}.self_attn.{name}_proj.weight": heads * HEAD for name, heads in zip("qkv", (12, 4, 4), strict=True)
    }
    shapes |= {f"{LAYER}.mlp.{name}_proj.weight": FFN for name in ("gate", "up")}
    # Every element has a value of its own: no swap of heads, groups or projections can pass.
    total = sum(rows * HIDDEN for rows in shapes.values())
    values = torch.arange(total, dtype=torch.float32).split([rows * HIDDEN for rows in shapes.values()])
    checkpoint = {name: part.view(-1, HIDDEN) for name, part in zip(shapes, values, strict=True)}

    found = {name: torch.full_like(tensor, -1.0) for name, tensor in checkpoint.items()}
    for tp_rank in range(TP):
        qkv, fc1 = megatron_shards(checkpoint, tp_rank)
        # In a trainer these are the live parameters; each rank hands its source to rankcast.connect.
        source = DeclaredSource([*declared_qkv(qkv, tp_rank), *declared_mlp(fc1, tp_rank)])
        for shard in source.shards():
            assert isinstance(shard.memory, torch.Tensor)
            assert shard.memory.untyped_storage().data_ptr() in (
                qkv.untyped_storage().data_ptr(),
                fc1.untyped_storage().data_ptr(),
            ), "a declaration must be a view, not a copy"
            (row, _), (rows, _) = shard.box.offsets, shard.box.sizes
            found[shard.meta.name][row : row + rows] = shard.memory
        print(f"rank {tp_rank}: {len(source.shards())} boxes of {len(source.manifest())} tensors")
    for name, tensor in checkpoint.items():
        assert torch.equal(found[name], tensor), name
    print("all boxes together are the checkpoint, element by element")


if __name__ == "__main__":
    main()
