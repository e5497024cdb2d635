"""A trace as data: written down and read again, hashed, and compared in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from rankcast.errors import ManifestError
from rankcast.manifest import Manifest, TensorMeta
from rankcast.trace.columns import Trace
from rankcast.trace.fingerprint import Fingerprint
from rankcast.trace.record import trace_loader

SAID = Fingerprint(model="Model", engine="engine 1", layout="tp 0 of 2", experts="0123")


def taken(
    shapes: dict[str, tuple[int, ...]] | None = None,
    *,
    rows: tuple[int, int] = (0, 4),
    pad: float = 0.0,
    tied: bool = False,
    parameters: dict[str, nn.Parameter] | None = None,
    said: Fingerprint = SAID,
) -> Trace:
    """The trace of a loader that stacks ``a`` and ``b`` in one parameter, from ``rows`` on, and pads what is left."""
    given = shapes or {"a": (3, 2), "b": (3, 2)}
    held = parameters or {"w": nn.Parameter(torch.ones(8, 2), requires_grad=False)}
    weight = next(iter(held.values()))
    if tied:
        held = {**held, "again": weight}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for (_, tensor), row in zip(weights, rows, strict=False):
            weight.data[row : row + len(tensor)].copy_(tensor)
            weight.data[row + 3 : row + 4].fill_(pad)

    manifest = Manifest.of(TensorMeta(name, "float32", shape) for name, shape in given.items())
    return trace_loader(load, held, manifest, said)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=False)


def test_a_trace_that_was_written_down_is_read_again_as_an_equal_one() -> None:
    trace = taken(tied=True)
    again = Trace.from_json(trace.to_json())
    assert again == trace
    assert again.hash == trace.hash
    assert again.fingerprint == SAID
    assert trace.diff(again) == []


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff", taken().to_json()[:-1], b'{"colour": 1}'])
def test_what_is_no_trace_is_refused_by_name(text: bytes) -> None:
    with pytest.raises(ManifestError, match="this is no trace"):
        Trace.from_json(text)


CHANGED: dict[str, tuple[Callable[[], Trace], list[str]]] = {
    "the model's class": (
        lambda: taken(said=Fingerprint("Other", "engine 1", "tp 0 of 2", "0123")),
        ["the class of the model was Model and is Other"],
    ),
    "engine and layout": (
        lambda: taken(said=Fingerprint("Model", "engine 2", "", "0123")),
        ["the engine was engine 1 and is engine 2", "the layout was tp 0 of 2 and is not told"],
    ),
    "the experts": (
        lambda: taken(said=Fingerprint("Model", "engine 1", "tp 0 of 2", "4567")),
        ["the placement of the experts was 0123 and is 4567"],
    ),
    "where tensors go": (
        lambda: taken(rows=(4, 0)),
        [
            (
                "what is copied of a was [3, 2] from 0 by [2, 1] to w at 0 by [2, 1] and is "
                "[3, 2] from 0 by [2, 1] to w at 8 by [2, 1]"
            ),
            (
                "what is copied of b was [3, 2] from 0 by [2, 1] to w at 8 by [2, 1] and is "
                "[3, 2] from 0 by [2, 1] to w at 0 by [2, 1]"
            ),
            (
                "what w is filled with was 0.0 at 6, [1, 2] by [2, 1]; 0.0 at 14, [1, 2] by [2, 1] and is 0.0 at 14, "
                "[1, 2] by [2, 1]; 0.0 at 6, [1, 2] by [2, 1]"
            ),
        ],
    ),
    "the padding": (
        lambda: taken(pad=1.0),
        [
            (
                "what w is filled with was 0.0 at 6, [1, 2] by [2, 1]; 0.0 at 14, [1, 2] by [2, 1] and is 1.0 at 6, "
                "[1, 2] by [2, 1]; 1.0 at 14, [1, 2] by [2, 1]"
            )
        ],
    ),
    "a tie": (lambda: taken(tied=True), ["what again is tied to was nothing and is w"]),
    "a parameter's dtype": (
        lambda: taken(parameters={"w": parameter(8, 2, dtype=torch.float64)}),
        ["parameter w float32[8, 2] is now float64[8, 2]"],
    ),
    "one more parameter": (
        lambda: taken(parameters={"w": parameter(8, 2), "v": parameter(1)}),
        ["parameter v float32[1] is new", "the strides of v was nothing and is [1]"],
    ),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_diff_says_in_words_what_changed(change: str) -> None:
    make, lines = CHANGED[change]
    after = make()
    assert taken().diff(after) == lines
    assert taken().hash != after.hash


def test_a_diff_names_tensors_that_came_and_went() -> None:
    lines = taken().diff(taken({"a": (3, 2), "c": (3, 2)}))
    assert lines[:2] == ["tensor b float32[3, 2] is gone", "tensor c float32[3, 2] is new"]


def test_traces_that_differ_in_order_only_are_not_said_to_be_equal() -> None:
    one, other = (taken(dict.fromkeys(names, (0, 2)), rows=(0, 0)) for names in ("ab", "ba"))
    assert one.diff(other) == ["the order of tensors, parameters or writes is another"]
