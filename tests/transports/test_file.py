"""Files as segments: what another process reads through a handle, and every way in which a file can turn out changed.

It knows files and handles; it must not know what a checkpoint is.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankcast.errors import LocationError
from rankcast.transports.file import ExportedFile, OpenedFile
from rankcast.transports.shm import open_handle
from rankcast.wire.handles import FORMAT, FileHandle, Handle, kind_of

CONTENT = bytes(np.random.default_rng(5).integers(0, 256, 100_000, dtype=np.uint8))

READER = """
import sys, msgspec, torch
from rankcast.transports.file import OpenedFile
from rankcast.wire.handles import Handle
opened = []
for line in sys.stdin:
    try:
        if line.startswith("{"):
            opened.append(OpenedFile(msgspec.json.decode(line, type=Handle)))
            answer = "open"
        elif line.startswith("verify"):
            answer = opened[-1].verify()
        else:
            offset, size = map(int, line.split())
            buffer = torch.zeros(size, dtype=torch.uint8)
            opened[-1].read_into(offset, buffer, name="w")
            answer = buffer.tolist()
    except Exception as refused:
        answer = f"{type(refused).__name__}: {refused}"
    print(msgspec.json.encode(answer).decode(), flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "model.safetensors"
    made.write_bytes(CONTENT)
    return made


def encoded(handle: Handle) -> str:
    return msgspec.json.encode(handle).decode()


def test_another_process_reads_any_part_through_the_handle(path: Path, child: Callable) -> None:
    with ExportedFile(path) as exported:
        handle = exported.handle
        assert msgspec.json.decode(msgspec.json.encode(handle), type=Handle) == handle
        assert kind_of(handle) == "file"
        assert str(path).encode() not in msgspec.json.encode(handle)
        process = child(READER)
        assert process.ask(encoded(handle)) == "open"
        assert process.ask("99990 10") == list(CONTENT[99990:])
        assert process.ask("12345 7") == list(CONTENT[12345:12352])
        assert process.ask("verify") is None
        assert process.ask("99990 11").startswith("LocationError: w would lie at bytes 99990..100001")
        assert process.ask("-1 1").startswith("LocationError")


@given(st.integers(0, 99_000), st.integers(0, 100), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
def test_a_buffer_of_any_dtype_gets_the_bytes_at_any_offset(offset: int, count: int, dtype: torch.dtype) -> None:
    with ExportedFile(_FILE) as exported, OpenedFile(exported.handle) as opened:
        around = torch.full((count + 2,), 3, dtype=dtype)
        opened.read_into(offset, around[1 : 1 + count])
        size = count * dtype.itemsize
        assert around[1 : 1 + count].view(torch.uint8).numpy().tobytes() == CONTENT[offset : offset + size]
        assert (around[0], around[-1]) == (3, 3)


@pytest.fixture(autouse=True, scope="module")
def _file(tmp_path_factory: pytest.TempPathFactory) -> None:
    global _FILE
    _FILE = tmp_path_factory.mktemp("file") / "content"
    _FILE.write_bytes(CONTENT)


_FILE = Path()


def test_a_tensor_is_read_in_its_shape(path: Path) -> None:
    with ExportedFile(path) as exported, OpenedFile(exported.handle) as opened:
        tensor = opened.tensor("bfloat16", (3, 5), 17)
        assert tensor.view(torch.uint8).numpy().tobytes() == CONTENT[17 : 17 + 30]
        assert opened.tensor("float32", (), 3).shape == ()
        assert opened.tensor("float32", (0, 4), 0).shape == (0, 4)
        for shape in ((-1,), (10**9, 10**9)):
            with pytest.raises(LocationError):
                opened.tensor("float32", shape, 0)


def test_a_dense_buffer_of_one_element_with_an_odd_stride_is_filled(path: Path) -> None:
    with ExportedFile(path) as exported, OpenedFile(exported.handle) as opened:
        base = torch.zeros(3)
        opened.read_into(8, base[1::2])
        assert base.view(torch.uint8).numpy().tobytes() == bytes(4) + CONTENT[8:12] + bytes(4)


def test_a_buffer_that_cannot_be_filled_is_refused(path: Path) -> None:
    with ExportedFile(path) as exported, OpenedFile(exported.handle) as opened:
        for buffer in (torch.empty(8)[::2], torch.empty(4, device="meta")):
            with pytest.raises(ValueError):
                opened.read_into(0, buffer)


def test_pieces_of_a_read_are_put_together(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankcast.transports.file._READ_AT_ONCE", 1000)
    with ExportedFile(path) as exported, OpenedFile(exported.handle) as opened:
        assert opened.tensor("uint8", (99_999,), 1).numpy().tobytes() == CONTENT[1:]


def truncate(path: Path) -> None:
    os.truncate(path, 50_000)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"xyz")
    # Written within one tick of the file system's clock, it would look the same.
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [(truncate, "50000"), (append, "100001"), (rewrite, "rewritten")],
    ids=lambda c: getattr(c, "__name__", ""),
)
def test_a_file_that_changed_is_refused_at_open_at_verify_and_at_the_owner(
    path: Path, change: Callable[[Path], None], said: str
) -> None:
    with ExportedFile(path) as exported, OpenedFile(exported.handle) as opened:
        opened.verify()
        exported.verify()
        change(path)
        for step in (opened.verify, exported.verify, lambda: OpenedFile(exported.handle)):
            with pytest.raises(LocationError) as caught:
                step()
            assert said in str(caught.value)
            assert str(path) in str(caught.value)


def test_a_file_that_ends_early_is_named_and_not_a_signal(path: Path) -> None:
    with ExportedFile(path) as exported, OpenedFile(exported.handle) as opened:
        truncate(path)
        with pytest.raises(LocationError) as caught:
            opened.read_into(40_000, torch.empty(20_000, dtype=torch.uint8), name="layers.0.w")
        assert all(part in str(caught.value) for part in ("layers.0.w", str(path), "50000", "truncated"))
        assert caught.value.tensor == "layers.0.w"


def test_a_replaced_path_is_seen_by_the_owner_and_the_old_bytes_stay_readable(path: Path) -> None:
    with ExportedFile(path) as exported, OpenedFile(exported.handle) as opened:
        (path.parent / "new").write_bytes(bytes(100_000))
        os.replace(path.parent / "new", path)
        with pytest.raises(LocationError, match="replaced"):
            exported.verify()
        assert opened.tensor("uint8", (100_000,), 0).numpy().tobytes() == CONTENT
        path.unlink()
        with pytest.raises(LocationError, match="gone"):
            exported.verify()


def test_a_descriptor_that_was_given_to_another_file_is_refused(path: Path, tmp_path: Path) -> None:
    with ExportedFile(path) as exported, OpenedFile(exported.handle) as opened:
        (tmp_path / "other").write_bytes(CONTENT)
        other = os.open(tmp_path / "other", os.O_RDONLY)
        os.dup2(other, exported.handle.descriptor)
        os.close(other)
        for step in (opened.verify, lambda: OpenedFile(exported.handle)):
            with pytest.raises(LocationError, match="replaced"):
                step()


def test_a_closed_descriptor_and_a_dead_owner_are_refused(path: Path, child: Callable) -> None:
    exported = ExportedFile(path)
    with OpenedFile(exported.handle) as opened:
        exported.close()
        exported.close()
        with pytest.raises(LocationError, match="gone"):
            opened.verify()
        with pytest.raises(LocationError, match="gone"):
            OpenedFile(exported.handle)
        with pytest.raises(LocationError, match="closed"):
            exported.verify()
        assert opened.tensor("uint8", (5,), 0).numpy().tobytes() == CONTENT[:5]
    owner = child(
        f"""
        import msgspec, sys
        from rankcast.transports.file import ExportedFile
        exported = ExportedFile({str(path)!r})
        print(msgspec.json.encode(exported.handle).decode(), flush=True)
        sys.stdin.readline()
        """
    )
    handle = msgspec.json.decode(owner.hear(), type=Handle)
    with OpenedFile(handle) as opened:
        owner.kill()
        with pytest.raises(LocationError, match=f"pid {owner.pid}"):
            opened.verify()
    with pytest.raises(LocationError, match=f"pid {owner.pid}"):
        OpenedFile(handle)


def test_a_file_that_nobody_refers_to_any_more_is_closed(path: Path) -> None:
    def held() -> int:
        return sum(Path(f"/proc/self/fd/{fd}").exists() for fd in os.listdir("/proc/self/fd"))

    before = held()
    exported = ExportedFile(path)
    assert held() == before + 1
    del exported
    assert held() == before
    exported = ExportedFile(path)
    exported.close()
    # Its number is another file's now, which is left alone.
    with path.open("rb") as other:
        assert other.fileno() == exported.handle.descriptor
        del exported
        assert other.read() == CONTENT


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "format 2"),
        ({"size": 99_999}, "99999"),
        ({"inode": 1}, "replaced"),
        ({"device": 1}, "replaced"),
        ({"mtime_ns": 1}, "rewritten"),
        ({"descriptor": 9999}, "gone"),
    ],
)
def test_a_handle_that_says_otherwise_is_refused(path: Path, change: dict[str, int], said: str) -> None:
    with ExportedFile(path) as exported:
        with pytest.raises(LocationError, match=said):
            OpenedFile(msgspec.structs.replace(exported.handle, **change))
        owner = msgspec.structs.replace(exported.handle.owner, host="elsewhere")
        with pytest.raises(LocationError, match="elsewhere"):
            OpenedFile(msgspec.structs.replace(exported.handle, owner=owner))
        owner = msgspec.structs.replace(exported.handle.owner, namespace="pid:[1]")
        with pytest.raises(LocationError, match="namespace"):
            OpenedFile(msgspec.structs.replace(exported.handle, owner=owner))
        owner = msgspec.structs.replace(exported.handle.owner, start_time=1)
        with pytest.raises(LocationError, match="restarted"):
            OpenedFile(msgspec.structs.replace(exported.handle, owner=owner))


def test_only_regular_files_are_exported_and_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path / "pipe", tmp_path, Path("/dev/null"), tmp_path / "absent"):
        with pytest.raises(LocationError) as caught:
            ExportedFile(odd)
        assert str(odd) in str(caught.value)
    reading, writing = os.pipe()
    try:
        status = os.fstat(reading)
        with ExportedFile(_FILE) as exported:
            handle = FileHandle(
                FORMAT, exported.handle.owner, reading, 0, status.st_dev, status.st_ino, status.st_mtime_ns
            )
            with pytest.raises(LocationError, match="not a regular file"):
                OpenedFile(handle)
    finally:
        os.close(reading)
        os.close(writing)


def test_a_file_is_never_mapped_as_shared_memory(path: Path) -> None:
    with ExportedFile(path) as exported:
        with pytest.raises(LocationError, match="never mapped"):
            open_handle(exported.handle)


def test_the_descriptor_is_read_only_and_nothing_is_left_open(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with ExportedFile(path) as exported, OpenedFile(exported.handle) as opened:
        with pytest.raises(OSError):
            os.write(exported.handle.descriptor, b"x")
        opened.close()
        with pytest.raises(LocationError, match="closed"):
            opened.read_into(0, torch.empty(1))
        with pytest.raises(LocationError, match="closed"):
            opened.verify()
        with pytest.raises(LocationError):
            OpenedFile(msgspec.structs.replace(exported.handle, size=1))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_low_soft_limit_is_raised(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 5, hard))
        held = [ExportedFile(path) for _ in range(20)]
        assert len({exported.handle.descriptor for exported in held}) == 20
    finally:
        for exported in held:
            exported.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
