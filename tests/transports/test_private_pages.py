"""Whether a write into a private mapping is noticed, by whichever way it was made."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from rankcast.transports import private_pages
from rankcast.transports.private_pages import may_have_written
from rankcast.transports.segment import OpenedSegment
from rankcast.transports.shm import create_segment, open_handle

SIZE = 5 * 4096 + 17


@pytest.fixture
def opened() -> Iterator[OpenedSegment]:
    with create_segment(SIZE) as segment:
        segment.memory.fill_(3)
        with open_handle(segment.handle) as made:
            yield made


def written(opened: OpenedSegment) -> bool:
    assert opened._memory is not None
    return may_have_written(opened._memory.data_ptr(), opened.size)


def last_byte(opened: OpenedSegment) -> torch.Tensor:
    return opened.tensor("uint8", (1,), SIZE - 1)


WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda tensor: tensor.add_(1),
    "through data": lambda tensor: tensor.data.add_(1),
    "through numpy": lambda tensor: tensor.numpy().fill(4),
}


def test_reading_is_no_write(opened: OpenedSegment) -> None:
    assert not written(opened)
    assert opened.tensor("uint8", (SIZE,), 0).sum().item() == 3 * SIZE
    assert not written(opened)


@pytest.mark.parametrize("way", WAYS)
def test_a_write_of_the_last_byte_is_noticed_until_it_is_dropped(way: str, opened: OpenedSegment) -> None:
    WAYS[way](last_byte(opened))
    assert written(opened)
    opened.refresh()
    assert last_byte(opened).item() == 3
    assert not written(opened)


def test_pages_that_nobody_wrote_stay_mapped(opened: OpenedSegment, monkeypatch: pytest.MonkeyPatch) -> None:
    drops: list[int] = []
    mapping = opened._mapping  # type: ignore[attr-defined]  # of the one kind that there is here

    class Watched:
        def madvise(self, advice: int) -> None:
            drops.append(advice)
            mapping.madvise(advice)

    opened._mapping = Watched()  # type: ignore[attr-defined]  # as above
    opened.tensor("uint8", (SIZE,), 0).sum()
    opened.refresh()
    assert drops == []
    last_byte(opened).add_(1)
    opened.refresh()
    assert len(drops) == 1
    opened._mapping = mapping  # type: ignore[attr-defined]  # as above


def test_without_a_page_map_every_mapping_may_have_been_written(
    opened: OpenedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_pages, "_PAGEMAP", "/proc/self/no-such-file")
    assert written(opened)
