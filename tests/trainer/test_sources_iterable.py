"""A stream as a source: it is held to its manifest, one tensor at a time.

It knows streams and how they deviate; it must not know pushes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from rankcast.errors import ManifestError, SourceError, UnsupportedError
from rankcast.manifest import Manifest, TensorMeta
from rankcast.trainer.sources import IterableSource, ModuleSource, SafetensorsSource, as_source

Pair = tuple[str, torch.Tensor]

ABC: list[Pair] = [
    ("a", torch.tensor([1.0, -0.0])),
    ("b", torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t()),
    ("c", torch.tensor(7)),
]


def written(source: IterableSource) -> dict[str, bytes]:
    found = {}
    for weight in source.read():
        buffer = torch.empty(weight.meta.nbytes, dtype=torch.uint8)
        weight.write(buffer)
        found[weight.meta.name] = buffer.numpy().tobytes()
    return found


def test_one_dry_pass_learns_names_dtypes_and_shapes() -> None:
    passes = []

    def factory() -> Iterator[Pair]:
        passes.append(1)
        yield from ABC

    source = IterableSource(factory)
    expected = Manifest(("a", "b", "c"), ("float32", "bfloat16", "int64"), ((2,), (3, 2), ()))
    assert source.manifest() == source.manifest() == expected
    assert len(passes) == 1
    assert written(source) == {
        "a": ABC[0][1].numpy().tobytes(),
        "b": ABC[1][1].contiguous().view(torch.int16).numpy().tobytes(),
        "c": ABC[2][1].numpy().tobytes(),
    }
    assert len(passes) == 2


@pytest.mark.parametrize(
    "metadata",
    [
        Manifest(("a", "b", "c"), ("float32", "bfloat16", "int64"), ((2,), (3, 2), ())),
        [TensorMeta("a", "float32", (2,)), ("b", torch.bfloat16, [3, 2]), ("c", "torch.int64", torch.Size([]))],
    ],
)
def test_stated_metadata_spares_the_dry_pass(metadata: Manifest) -> None:
    def never() -> Iterator[Pair]:
        raise AssertionError

    stated = IterableSource(never, metadata=metadata).manifest()
    assert stated == IterableSource(lambda: ABC).manifest()


@pytest.mark.parametrize(
    "metadata", [[("a", "float32", [1]), ("a", "float32", [1])], [("a", "float99", [1])], [("a", "float32", [-1])]]
)
def test_metadata_that_makes_no_sense_is_refused(metadata: list[tuple[str, str, list[int]]]) -> None:
    with pytest.raises(ManifestError):
        IterableSource(lambda: ABC, metadata=metadata)


def other(name: str, tensor: torch.Tensor) -> Callable[[], list[Pair]]:
    return lambda: [(name, tensor) if name == pair[0] else pair for pair in ABC]


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (lambda: ABC[:2], ["2 of 3", "c did not come"]),
        (lambda: iter(()), ["a did not come", "fresh iterator"]),
        (lambda: [*ABC, ("d", torch.zeros(1))], ["yields d", "does not have"]),
        (lambda: [ABC[0], *ABC], ["yields a twice"]),
        (lambda: [*ABC, ABC[2]], ["yields c twice"]),
        (lambda: [ABC[1], ABC[0], ABC[2]], ["yields b where", "has a", "same order"]),
        (other("b", torch.zeros(2, 3, dtype=torch.bfloat16)), ["b came as bfloat16[2, 3]", "bfloat16[3, 2]"]),
        (other("c", torch.tensor(7.0)), ["c came as float32[]", "int64[]"]),
        (lambda: ["a"], ["item 0", "str"]),
        (lambda: [("a", [1.0])], ["item 0", "(str, list)"]),
        (lambda: dict(ABC), ["item 0", "str"]),
    ],
)
def test_a_stream_that_deviates_is_refused_naming_the_tensor_and_both_values(
    stream: Callable[[], list[Pair]], said: list[str]
) -> None:
    source = IterableSource(stream, metadata=IterableSource(lambda: ABC).manifest())
    with pytest.raises(SourceError) as caught:
        written(source)
    assert all(part in str(caught.value) for part in said)


def test_a_name_given_twice_is_refused_by_the_dry_pass() -> None:
    with pytest.raises(SourceError) as caught:
        IterableSource(lambda: [*ABC, ABC[0]]).manifest()
    assert caught.value.tensor == "a"


class Closing:
    """A stream that says whether it was closed."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.closed = False
        self._fail_at = fail_at
        self._position = 0

    def __iter__(self) -> Closing:
        return self

    def __next__(self) -> Pair:
        if self._position == self._fail_at:
            raise RuntimeError("collective failed")
        self._position += 1
        if self._position > 3:
            raise StopIteration
        return ABC[self._position - 1]

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("fail_at", [None, 0, 2])
def test_a_stream_is_closed_however_a_pass_ends_and_its_own_error_comes_through(fail_at: int | None) -> None:
    streams: list[Closing] = []

    def factory() -> Closing:
        streams.append(Closing(fail_at))
        return streams[-1]

    source = IterableSource(factory, metadata=IterableSource(lambda: ABC).manifest())
    learning = IterableSource(factory)
    if fail_at is None:
        written(source)
        learning.manifest()
    else:
        for attempt in (lambda: written(source), learning.manifest):
            with pytest.raises(RuntimeError, match="collective failed"):
                attempt()
    reader = source.read()
    if fail_at != 0:
        next(reader)
    reader.close()
    assert len(streams) == (2 if fail_at == 0 else 3)
    assert all(stream.closed for stream in streams)


def test_no_more_than_one_tensor_is_alive_at_a_time() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = []

    def factory() -> Iterator[Pair]:
        for number in range(5):
            most.append(sum(one() is not None for one in alive))
            tensor = torch.zeros(3)
            alive.append(weakref.ref(tensor))
            pair = (f"w{number}", tensor)
            del tensor
            yield pair
            del pair

    gc.disable()
    try:
        source = IterableSource(factory)
        source.manifest()
        kept = list(source.read())  # a caller that keeps every weight still keeps no tensor
    finally:
        gc.enable()
    assert max(most) == 0
    with pytest.raises(SourceError) as caught:
        kept[0].write(torch.empty(12, dtype=torch.uint8))
    assert "w0" in str(caught.value)
    assert all(weight.tensor is None for weight in kept)


def test_an_empty_stream_is_a_source_of_nothing() -> None:
    source = IterableSource(list)
    assert len(source.manifest()) == 0
    assert list(source.read()) == []


def test_each_kind_of_thing_makes_its_kind_of_source(tmp_path: Path) -> None:
    stream = IterableSource(lambda: ABC)
    assert as_source(stream) is stream
    assert type(as_source(nn.Linear(1, 1))) is ModuleSource  # a module is callable too
    assert type(as_source(str(tmp_path))) is type(as_source(tmp_path)) is SafetensorsSource
    assert type(as_source(lambda: ABC)) is IterableSource


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (3, "int"),
        (None, "NoneType"),
        (iter(ABC), "only once"),
        (ABC, "list"),
        (dict(ABC), "lambda: iter(tensors.items())"),
    ],
)
def test_anything_else_is_refused_with_what_there_is(thing: object, said: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        as_source(thing)
    assert said in str(caught.value)
    assert all(part in str(caught.value) for part in ("nn.Module", "WeightSource", "safetensors", "function"))
