"""Limits of the machine are asked before they are run into, and named with the cure."""

from __future__ import annotations

import os
import resource
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rankcast.errors import LimitError
from rankcast.transports.limits import (
    check_mappings,
    check_room,
    control_group_room,
    named_room,
    raise_descriptor_limit,
)


def test_what_fits_passes_and_what_does_not_is_refused_with_both_numbers() -> None:
    check_room(1, "shm")
    check_room(1, "shm_name")
    with pytest.raises(LimitError, match=r"does not fit into memory: .* leaves [\d,]+ bytes.*bucket_bytes"):
        check_room(2**60, "shm")
    with pytest.raises(LimitError, match=r"/dev/shm, which has [\d,]+ bytes free.*--shm-size"):
        check_room(named_room() + 2**30, "shm_name")


SMALL = """
import os
from rankcast.errors import LimitError
from rankcast.transports.shm import create_segment, open_handle
free = os.statvfs("/dev/shm")
assert free.f_blocks * free.f_frsize == 16 * 2**20, free
with create_segment(10 * 2**20, kind="shm_name") as first:
    first.memory.fill_(1)
    try:
        create_segment(8 * 2**20, kind="shm_name")
    except LimitError as refused:
        print(refused)
    assert os.listdir("/dev/shm") == [first.handle.name]
with create_segment(64 * 2**20) as anonymous:  # not limited by it
    anonymous.memory.fill_(1)
    with open_handle(anonymous.handle) as opened:
        print(int(opened.tensor("uint8", (1,), 64 * 2**20 - 1)))
"""


def in_a_small_shared_memory(code: str) -> subprocess.CompletedProcess[str]:
    mount = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$0" -c "$1"'
    if subprocess.run(["unshare", "-m", "sh", "-c", mount, "true", ""], capture_output=True, timeout=60).returncode:
        pytest.skip("this machine does not allow a mount of one's own (unshare -m)")
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, sys.executable, code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")},
    )


def test_a_16_mb_shared_memory_gives_a_clear_refusal_and_no_sigbus() -> None:
    done = in_a_small_shared_memory(SMALL)
    assert done.returncode == 0, done.stderr
    refusal, last = done.stdout.strip().splitlines()
    assert last == "1"
    assert "a segment of 8,388,608 bytes does not fit into /dev/shm, which has 6,291,456 bytes free" in refusal
    assert "--shm-size" in refusal
    assert "bucket_bytes" in refusal


def test_room_that_is_taken_between_the_question_and_the_file_is_an_error_and_no_sigbus() -> None:
    code = SMALL.replace(
        "from rankcast.transports.shm import",
        "import rankcast.transports.shm as shm\nfrom rankcast.transports.shm import",
    )
    # The question is answered as if the first segment were not there yet: that is what a race looks like.
    code = code.replace("    try:\n", "    shm.check_room = lambda size, kind: None\n    try:\n", 1)
    done = in_a_small_shared_memory(code)
    assert done.returncode == 0, done.stderr
    assert "no room for a segment of 8,388,608 bytes" in done.stdout


def grown(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_tightest_control_group_on_the_way_up_counts_and_page_cache_is_free(tmp_path: Path) -> None:
    grown(tmp_path / "a" / "b", memory__max="max", memory__current=50)
    grown(tmp_path / "a", memory__max=100, memory__current=60, memory__stat="anon 5\ninactive_file 7\nactive_file 3")
    assert control_group_room(tmp_path, "0::/a/b") == 50
    grown(tmp_path / "a" / "b", memory__max=70, memory__current=90)
    assert control_group_room(tmp_path, "0::/a/b") == 0
    assert control_group_room(tmp_path, "0::/elsewhere") is None
    assert control_group_room(tmp_path, "") is None


def test_the_older_control_groups_are_read_too(tmp_path: Path) -> None:
    grown(
        tmp_path / "memory" / "job",
        memory__limit_in_bytes=1000,
        memory__usage_in_bytes=400,
        memory__stat="inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 20",
    )
    assert control_group_room(tmp_path, "5:cpuset:/\n4:memory:/job\n0::/") == 650


def test_the_control_group_of_this_process_is_found_where_it_really_is(child: Callable[..., object]) -> None:
    root = Path("/sys/fs/cgroup/memory")
    group = root / f"rankcast-test-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs a writable control group (version 1)")
    try:
        (group / "memory.limit_in_bytes").write_text(str(256 * 2**20))
        code = """
        import os
        open("%s", "w").write(str(os.getpid()))
        from rankcast.errors import LimitError
        from rankcast.transports.shm import create_segment
        create_segment(2**20).close()
        try:
            create_segment(300 * 2**20)
        except LimitError as refused:
            print(refused, flush=True)
        """
        one = child(code % (group / "cgroup.procs"))
        assert "the memory limit of the control group leaves" in one.hear()
        one.end()
    finally:
        group.rmdir()


def test_the_soft_descriptor_limit_is_raised_as_far_as_needed_and_never_lowered() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
        raise_descriptor_limit(200)
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(200)]
        for descriptor in held:
            os.close(descriptor)
        raise_descriptor_limit(1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == raised
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_hard_descriptor_limit_in_the_way_is_named_with_the_soft_one_and_the_cure() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("no hard limit here")
    with pytest.raises(LimitError, match=rf"soft limit is {soft:,} and the hard limit {hard:,}.*ulimit -n"):
        raise_descriptor_limit(hard)


def test_more_mappings_than_the_kernel_allows_are_refused_with_the_cure() -> None:
    check_mappings(1)
    allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
    with pytest.raises(LimitError, match=rf"max_map_count is {allowed:,}.*sysctl"):
        check_mappings(allowed)
