"""Segments across processes: who sees what, what is refused by name, and that nothing stays behind."""

from __future__ import annotations

import errno
import gc
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from rankcast.errors import LimitError, LocationError
from rankcast.process import pid_namespace, start_time, this_process
from rankcast.transports.segment import Segment
from rankcast.transports.shm import create_segment, kind_of, open_handle, sweep_leftovers
from rankcast.wire.handles import FORMAT, Handle, ShmHandle
from shared_memory import names

KINDS = ("shm", "shm_name")
PAGE = os.sysconf("SC_PAGE_SIZE")


def mappings() -> int:
    # Only of this file's own kind, so that what Python or torch maps meanwhile does not count.
    return sum("rankcast" in line for line in Path("/proc/self/maps").read_text().splitlines())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def changed(handle: Handle, **fields: object) -> Handle:
    return msgspec.structs.replace(handle, **fields)


@pytest.fixture(params=KINDS)
def segment(request: pytest.FixtureRequest) -> Iterator[Segment]:
    with create_segment(3 * PAGE + 5, kind=request.param) as made:
        yield made


def test_a_new_segment_is_zero_and_has_the_size_asked_for(segment: Segment) -> None:
    assert segment.size == segment.handle.size == segment.memory.numel() == 3 * PAGE + 5
    assert segment.memory.dtype == torch.uint8
    assert not segment.memory.any()


def test_an_empty_segment_has_one_byte_so_that_it_can_be_mapped() -> None:
    with create_segment(0) as made, open_handle(made.handle) as opened:
        assert opened.size == 1
        assert opened.tensor("float32", (0, 5), 0).shape == (0, 5)


@pytest.mark.parametrize(("size", "kind"), [(-1, "shm"), (1, "file")])
def test_a_negative_size_and_an_unknown_kind_are_refused(size: int, kind: str) -> None:
    with pytest.raises(ValueError, match="segment"):
        create_segment(size, kind=kind)


def test_a_handle_survives_json_and_says_its_kind(segment: Segment) -> None:
    again = msgspec.json.decode(msgspec.json.encode(segment.handle), type=Handle)
    assert again == segment.handle
    with create_segment(1, kind=kind_of(again)) as other:
        assert type(other.handle) is type(again)


def test_another_process_sees_what_the_owner_writes_before_and_after_it_opened(
    segment: Segment, reader: Callable[[Handle], object]
) -> None:
    segment.memory.fill_(7)
    other = reader(segment.handle)
    assert other.ask("bytes_of().unique().tolist()") == [7]
    segment.memory[-1] = 9
    assert other.ask("bytes_of()[-2:].tolist()") == [7, 9]
    segment.memory.fill_(1)
    assert other.ask("bytes_of().unique().tolist()") == [1]


def test_a_reader_that_writes_never_reaches_the_owner_and_refresh_drops_what_it_wrote(
    segment: Segment, reader: Callable[[Handle], object]
) -> None:
    segment.memory.copy_(torch.arange(segment.size) % 251)
    before = segment.memory.clone()
    other, witness = reader(segment.handle), reader(segment.handle)
    other.ask("bytes_of()[:20].fill_(255).tolist()")
    other.ask("bytes_of()[-1:].fill_(255).tolist()")
    assert torch.equal(segment.memory, before)
    assert witness.ask("bytes_of().tolist()") == before.tolist()
    segment.memory.add_(1)
    assert other.ask("bytes_of()[:2].tolist()") == [255, 255]  # its own copy of that page
    assert other.ask("segment.refresh()") is None
    assert other.ask("bytes_of().tolist()") == segment.memory.tolist()


def test_a_tensor_taken_before_refresh_reads_the_new_bytes_after_it(segment: Segment) -> None:
    with open_handle(segment.handle) as opened:
        view = opened.tensor("uint8", (8,), 0)
        view.fill_(3)
        segment.memory[:8] = 4
        opened.refresh()
        assert view.tolist() == [4] * 8


def test_every_bit_pattern_arrives_as_it_is(reader: Callable[[Handle], object]) -> None:
    words = torch.tensor([0x7FC00001, 0x7F800001, 0x80000000, 0xFFFFFFFF], dtype=torch.int64)
    with create_segment(64) as made:
        made.memory[16:32].view(torch.int32).copy_(words.to(torch.int32))
        answer = reader(made.handle).ask('segment.tensor("float32", (2, 2), 16).view(torch.int32).flatten().tolist()')
    assert answer == words.to(torch.int32).tolist()


def test_the_owner_cannot_shrink_or_grow_an_anonymous_segment() -> None:
    with create_segment(PAGE) as made:
        for size in (1, 2 * PAGE):
            with pytest.raises(OSError) as refused:
                os.ftruncate(made.handle.descriptor, size)
            assert refused.value.errno == errno.EPERM


def test_a_named_segment_that_shrank_is_seen_at_open_and_at_verify() -> None:
    with create_segment(4 * PAGE, kind="shm_name") as made:
        with open_handle(made.handle) as opened:
            opened.verify()
            os.truncate(f"/dev/shm/{made.handle.name}", PAGE)
            with pytest.raises(LocationError, match=rf"shrank.*{PAGE} bytes now, {4 * PAGE}"):
                opened.verify()
        with pytest.raises(LocationError, match=f"{PAGE} bytes, its handle says {4 * PAGE}"):
            open_handle(made.handle)


def test_verify_sees_that_the_owner_closed_its_descriptor_or_uses_it_for_something_else() -> None:
    made = create_segment(PAGE)
    with open_handle(made.handle) as opened:
        opened.verify()
        made.close()
        with pytest.raises(LocationError, match="is gone"):
            opened.verify()
        other = create_segment(PAGE)
        os.dup2(other.handle.descriptor, made.handle.descriptor)
        try:
            with pytest.raises(LocationError, match=r"inode .* was replaced"):
                opened.verify()
            with pytest.raises(LocationError, match=r"inode .* was replaced"):
                open_handle(made.handle)
        finally:
            os.close(made.handle.descriptor)
            other.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": FORMAT + 1}, "format 2"),
        ({"size": 2 * PAGE}, f"has {PAGE} bytes, its handle says {2 * PAGE}"),
        ({"size": 0}, "has 0 bytes"),
        ({"size": -5}, "has -5 bytes"),
        ({"inode": 1 << 40}, "inode .* was replaced"),
        ({"device": 1 << 40}, "device .* was replaced"),
        ({"descriptor": 1 << 20}, "is gone"),
        ({"descriptor": -1}, "is gone"),
    ],
)
def test_a_handle_that_does_not_fit_the_memory_is_refused_by_what_differs(fields: dict, message: str) -> None:
    with create_segment(PAGE) as made:
        before = descriptors()
        with pytest.raises(LocationError, match=message):
            open_handle(changed(made.handle, **fields))
        assert descriptors() == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host": "0" * 36}, "another host"),
        ({"namespace": "pid:[1]"}, "another pid namespace.*shm_name"),
        ({"start_time": 1}, "the trainer restarted"),
        ({"pid": 2**22 + 1}, "died or is not visible"),
        ({"pid": -1}, "died or is not visible"),
    ],
)
def test_an_owner_that_is_not_the_one_described_is_refused_by_what_differs(fields: dict, message: str) -> None:
    with create_segment(PAGE) as made:
        with pytest.raises(LocationError, match=message):
            open_handle(changed(made.handle, owner=changed(made.handle.owner, **fields)))


def described(descriptor: int) -> ShmHandle:
    status = os.fstat(descriptor)
    size = max(status.st_size, 1)
    return ShmHandle(FORMAT, this_process(), descriptor, size, status.st_dev, status.st_ino)


def test_nothing_but_shared_memory_is_opened(tmp_path: Path) -> None:
    plain, pipe, folder = tmp_path / "file", tmp_path / "pipe", tmp_path
    plain.write_bytes(b"x" * 100)
    os.mkfifo(pipe)
    paths = [(plain, os.O_RDONLY), (pipe, os.O_RDONLY | os.O_NONBLOCK), (folder, os.O_RDONLY), (Path("/dev/zero"), 0)]
    opened = [os.open(path, flags) for path, flags in paths]
    left, right = socket.socketpair()
    opened += os.pipe()
    try:
        for descriptor in [*opened, left.fileno()]:
            with pytest.raises(LocationError, match=r"refused|is gone"):
                open_handle(described(descriptor))
    finally:
        left.close()
        right.close()
        for descriptor in opened:
            os.close(descriptor)


def test_a_file_on_disk_whose_name_looks_like_shared_memory_is_refused() -> None:
    path = Path(f"/memfd:{secrets.token_hex(4)}")
    try:
        path.write_bytes(b"x" * 100)
    except OSError:
        pytest.skip("needs to write a file to the root directory")
    try:
        with path.open("rb") as file, pytest.raises(LocationError, match="not shared memory"):
            open_handle(described(file.fileno()))
    finally:
        path.unlink()


@pytest.mark.parametrize("name", ["../etc/passwd", "other", "rankcast-1-1-1-xyz", "rankcast-1-1-1-" + "0" * 16 + "/a"])
def test_a_name_that_is_not_ours_is_refused(name: str) -> None:
    with create_segment(PAGE, kind="shm_name") as made:
        with pytest.raises(LocationError, match="not the name of a rankcast segment"):
            open_handle(changed(made.handle, name=name))


def test_a_symbolic_link_under_our_name_is_not_followed() -> None:
    with create_segment(PAGE, kind="shm_name") as made:
        name = made.handle.name[:-16] + secrets.token_hex(8)
        os.symlink(f"/dev/shm/{made.handle.name}", f"/dev/shm/{name}")
        try:
            with pytest.raises(LocationError, match="symbolic link"):
                open_handle(changed(made.handle, name=name))
        finally:
            os.unlink(f"/dev/shm/{name}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
@pytest.mark.parametrize("kind", KINDS)
def test_another_user_is_told_to_run_as_the_same_one(kind: str, child: Callable[..., object]) -> None:
    with create_segment(PAGE, kind=kind) as made:
        # It drops root after importing, because the environment may lie where another user cannot read.
        other = child(
            """
            import os, sys, msgspec
            from rankcast.errors import LocationError
            from rankcast.transports.shm import open_handle
            from rankcast.wire.handles import Handle
            os.setresuid(65534, 65534, 65534)
            try:
                open_handle(msgspec.json.decode(sys.stdin.readline(), type=Handle))
            except LocationError as refused:
                print(refused, flush=True)
            """
        )
        other.tell(msgspec.json.encode(made.handle).decode())
        assert "may not be opened by uid 65534" in (answer := other.hear())
        assert "same user" in answer


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_owner_is_named_and_an_open_segment_stays_readable(kind: str, child: Callable[..., object]) -> None:
    owner = child(OWNER.format(kind=kind))
    handle = msgspec.json.decode(owner.hear(), type=Handle)
    with open_handle(handle) as opened:
        owner.kill()
        with pytest.raises(LocationError, match=rf"pid {owner.pid}.* died"):
            opened.verify()
        assert opened.tensor("uint8", (3,), 0).tolist() == [5, 5, 5]
        if kind == "shm":
            assert not names()
            with pytest.raises(LocationError, match=rf"pid {owner.pid}, died"):
                open_handle(handle)
    sweep_leftovers()
    assert not names()


OWNER = """
import sys, msgspec
from rankcast.transports.shm import create_segment
segment = create_segment(100000, kind="{kind}")
segment.memory.fill_(5)
print(msgspec.json.encode(segment.handle).decode(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("kind", "ending"), [("shm", ""), ("shm_name", ""), ("shm_name", "sys.exit(3)"), ("shm_name", "raise RuntimeError")]
)
def test_nothing_is_left_when_an_owner_exits_without_closing(
    kind: str, ending: str, child: Callable[..., object]
) -> None:
    owner = child(OWNER.format(kind=kind) + ending)
    owner.hear()
    assert len(names()) == (kind == "shm_name")
    owner.end()
    assert not names()


def test_a_forked_child_that_exits_leaves_its_parents_file(child: Callable[..., object]) -> None:
    code = "\nimport os\nif os.fork() == 0: sys.exit(0)\nos.wait()\nprint(os.listdir('/dev/shm'), flush=True)\n"
    code += "sys.stdin.read()"
    owner = child(OWNER.format(kind="shm_name").replace("sys.stdin.read()\n", "") + code)
    handle = msgspec.json.decode(owner.hear(), type=Handle)
    assert handle.name in owner.hear()
    owner.end()
    assert not names()


def test_an_unlinked_segment_stays_mapped_for_everyone_who_has_it(reader: Callable[[Handle], object]) -> None:
    with create_segment(PAGE, kind="shm_name") as made:
        other = reader(made.handle)
        made.unlink()
        made.unlink()
        assert not names()
        made.memory.fill_(6)
        assert other.ask("segment.verify()") is None
        assert other.ask("bytes_of().unique().tolist()") == [6]
        with pytest.raises(LocationError, match="is gone"):
            open_handle(made.handle)


def test_sweeping_removes_what_the_dead_left_and_nothing_of_the_living(child: Callable[..., object]) -> None:
    namespace = pid_namespace().strip("pid:[]")
    dead, alive = (child(OWNER.format(kind="shm_name")) for _ in range(2))
    left, kept = (msgspec.json.decode(one.hear(), type=Handle).name for one in (dead, alive))
    dead.kill()
    me, tail = f"{os.getpid()}-{start_time(os.getpid())}", "0" * 16
    reused = f"rankcast-{os.getpid()}-1-{namespace}-{tail}"
    strangers = {f"rankcast-{dead.pid}-1-77-{tail}", "rankcast-mine", f"rankcast-{me}-{namespace}-{tail}"}
    for name in {reused, *strangers}:
        Path("/dev/shm", name).touch()
    try:
        assert set(sweep_leftovers()) == {left, reused}
        assert names() == {kept, *strangers}
        assert sweep_leftovers() == []
    finally:
        for name in strangers:
            Path("/dev/shm", name).unlink()
        alive.end()


@pytest.mark.parametrize("kind", KINDS)
def test_descriptors_and_mappings_are_flat_over_50_rounds_without_garbage_collection(kind: str) -> None:
    gc.collect()
    gc.disable()
    try:
        before = descriptors(), mappings()
        for _ in range(50):
            made = create_segment(PAGE, kind=kind)
            opened = open_handle(made.handle)
            opened.tensor("int32", (4,), 0).add_(1)
            assert (descriptors(), mappings()) == (before[0] + 3, before[1] + 2)
            opened.close()
            opened.close()
            made.close()
            made.close()
            assert (descriptors(), mappings()) == before
    finally:
        gc.enable()
    assert not names()


def test_dropping_a_segment_without_closing_it_frees_it_too() -> None:
    before = descriptors(), mappings()
    made = [create_segment(PAGE, kind=kind) for kind in KINDS]
    del made
    assert (descriptors(), mappings()) == before
    assert not names()


def test_a_view_that_outlives_close_stays_readable_and_frees_the_memory_when_it_goes(segment: Segment) -> None:
    before = descriptors(), mappings()
    opened = open_handle(segment.handle)
    segment.memory[:4] = 8
    view, mine = opened.tensor("uint8", (4,), 0), segment.memory[:4]
    opened.close()
    segment.close()
    assert view.tolist() == mine.tolist() == [8] * 4
    view.add_(1)
    mine.add_(1)
    del view, mine
    # The segment's own two descriptors and one mapping are gone besides.
    assert (descriptors(), mappings()) == (before[0] - 2, before[1] - 1)


def test_a_closed_segment_says_so(segment: Segment) -> None:
    opened = open_handle(segment.handle)
    opened.close()
    segment.close()
    for use in (lambda: segment.memory, lambda: opened.tensor("uint8", (1,), 0), opened.verify, opened.refresh):
        with pytest.raises(LocationError, match="closed"):
            use()


def test_many_segments_under_a_low_soft_limit_raise_it_and_under_a_low_hard_limit_are_refused(
    child: Callable[..., object],
) -> None:
    code = """
    import resource
    from rankcast.errors import LimitError
    from rankcast.transports.shm import create_segment, open_handle
    made = create_segment(10)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 400))
    held = []
    try:
        for _ in range(1000):
            held.append(open_handle(made.handle))
    except LimitError as refused:
        print(len(held), refused, flush=True)
    """
    count, message = child(code).hear().split(" ", 1)
    assert int(count) > 250
    assert "hard limit 400" in message
    assert "ulimit -n" in message


def test_a_limit_error_says_what_the_machine_has() -> None:
    with pytest.raises(LimitError, match=r"1,152,921,504,606,846,976 bytes does not fit.*bucket_bytes"):
        create_segment(2**60)


@pytest.mark.parametrize("kind", ["shm", "shm_name"])
def test_a_segment_that_is_left_open_when_its_process_exits_says_nothing_and_leaves_nothing(kind: str) -> None:
    # A global of a module that the interpreter takes apart later than rankcast's own.
    code = (
        "import os, rankcast.transports.shm as shm\n"
        f"os.kept = shm.create_segment(1, kind={kind!r})\n"
        "print(getattr(os.kept.handle, 'name', ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert not done.stdout.strip() or not Path("/dev/shm", done.stdout.strip()).exists()
