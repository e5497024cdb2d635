"""Tensors that lie in shared memory already are found there, and another process reads them where they lie."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rankcast.transports.live import SharedMemoryMap, handle_for
from rankcast.transports.shm import create_segment
from rankcast.wire.handles import Handle


def find(tensor: torch.Tensor) -> Any:
    return SharedMemoryMap().find(tensor.data_ptr(), tensor.numel() * tensor.itemsize)


@pytest.fixture(autouse=True)
def _file_descriptors() -> None:
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        pytest.skip("torch shares by name here, which leaves no descriptor to export")


def test_a_tensor_that_torch_shares_is_read_by_another_process(reader: Callable[[Handle], object]) -> None:
    tensor = torch.arange(5000, dtype=torch.float32).share_memory_()
    part = tensor[1234:]
    found = find(part)
    other = reader(handle_for(found))
    ask = f'segment.tensor("float32", (3,), {found.offset}).tolist()'
    assert other.ask(ask) == [1234.0, 1235.0, 1236.0]
    part[0] = -1.0
    assert other.ask(ask)[0] == -1.0
    assert other.ask(f'segment.tensor("float32", (1,), {found.offset}).fill_(9).tolist()') == [9.0]
    assert part[0] == -1.0


def test_a_rankcast_segment_is_found_at_every_offset() -> None:
    with create_segment(3 * mmap.PAGESIZE) as made:
        for offset in (0, 1, mmap.PAGESIZE - 1, mmap.PAGESIZE, 3 * mmap.PAGESIZE - 1):
            found = find(made.memory[offset:])
            assert found.offset == offset
            assert os.fstat(found.descriptor).st_ino == made.handle.inode
            assert found[2:] == (made.size, made.handle.device, made.handle.inode)


def test_many_tensors_are_found_with_one_map_each_in_its_own_file() -> None:
    tensors = [torch.full((100 + i,), float(i)).share_memory_() for i in range(50)]
    shared = SharedMemoryMap()
    found = [shared.find(t.data_ptr(), t.numel() * 4) for t in tensors]
    assert len({handle_for(one) for one in found}) == 50
    for tensor, one in zip(tensors, found, strict=True):
        raw = os.pread(one.descriptor, tensor.numel() * 4, one.offset)
        assert raw == tensor.numpy().tobytes()


def test_a_reader_in_the_same_process_who_may_close_it_at_any_time_is_not_taken_for_the_owner() -> None:
    low = os.open(os.devnull, os.O_RDONLY)
    try:
        with create_segment(mmap.PAGESIZE) as made:
            assert low < made.handle.descriptor
            reader = os.open(f"/proc/self/fd/{made.handle.descriptor}", os.O_RDONLY)
            os.dup2(reader, low)  # of two descriptors the kernel lists the lower first
            os.close(reader)
            assert find(made.memory).descriptor == made.handle.descriptor
    finally:
        os.close(low)


def test_private_memory_is_not_found() -> None:
    assert find(torch.ones(1000)) is None
    assert SharedMemoryMap().find(1, 1) is None
    assert SharedMemoryMap().find(2**64 - 1, 1) is None


def test_bytes_that_go_on_beyond_the_shared_ones_are_not_found() -> None:
    with create_segment(mmap.PAGESIZE) as made:
        address = made.memory.data_ptr()
        assert SharedMemoryMap().find(address, mmap.PAGESIZE) is not None
        assert SharedMemoryMap().find(address + 1, mmap.PAGESIZE) is None
        assert SharedMemoryMap().find(address, 0) is None
    with create_segment(10) as made:  # less than the page that it lies in
        assert SharedMemoryMap().find(made.memory.data_ptr(), 11) is None


def test_a_mapping_whose_protection_was_changed_in_part_is_still_one() -> None:
    with create_segment(4 * mmap.PAGESIZE) as made:
        libc = __import__("ctypes").CDLL(None, use_errno=True)
        address = __import__("ctypes").c_void_p(made.memory.data_ptr() + mmap.PAGESIZE)
        assert libc.mprotect(address, mmap.PAGESIZE, mmap.PROT_READ) == 0
        assert find(made.memory) is not None


def test_shared_memory_without_an_open_descriptor_is_not_found() -> None:
    mapping = mmap.mmap(-1, mmap.PAGESIZE)  # shared, anonymous
    assert find(torch.frombuffer(mapping, dtype=torch.uint8)) is None


def test_a_file_on_disk_is_not_shared_memory(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "weights", dtype=np.float32, mode="w+", shape=(1000,))
    on_disk = os.stat(tmp_path).st_dev != os.stat("/dev/shm").st_dev
    assert on_disk
    assert find(torch.from_numpy(mapped)) is None


def test_a_private_mapping_of_shared_memory_is_not_found() -> None:
    with create_segment(mmap.PAGESIZE) as made:
        private = mmap.mmap(made.handle.descriptor, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE)
        assert find(torch.frombuffer(private, dtype=torch.uint8)) is None
