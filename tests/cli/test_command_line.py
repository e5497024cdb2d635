"""How the command line begins and ends: help, versions, options, and failures without any server."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from fleets import environment
from rankcast.cli.options import parse_headers, parse_size
from rankcast.cli.push import version_of

COMMANDS = ["push", "status", "plan", "reference-server", "demo"]
HEAVY = {"torch", "vllm", "starlette", "uvicorn", "transformers", "safetensors", "httpx"}


@pytest.fixture
def dead_url() -> Iterator[str]:
    """A URL at which nobody listens; the port stays taken, so that nobody else can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("command", [[], *[[command] for command in COMMANDS]])
def test_help_tells_what_there_is_and_loads_nothing_heavy(command: list[str]) -> None:
    code = (
        "import sys, rankcast.cli\n"
        f"sys.argv = ['rankcast', *{command!r}, '--help']\n"
        "code = rankcast.cli.main()\n"
        f"print(code, sorted(set(sys.modules) & {HEAVY!r}), sorted(m for m in sys.modules if 'engines' in m))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment())
    assert done.stdout.endswith("0 [] []\n"), done.stdout + done.stderr
    assert all(name in done.stdout for name in (command or COMMANDS))
    assert "--json" in done.stdout or not command


def test_only_commands_that_exist_are_listed(run) -> None:
    assert not {"bench", "doctor"} & set(run("--help").out.split())


def test_the_version_is_the_installed_one(run) -> None:
    try:
        expected = importlib.metadata.version("rankcast")
    except importlib.metadata.PackageNotFoundError:
        expected = "(not installed)"
    ran = run("--version")
    assert (ran.code, ran.out) == (0, f"rankcast {expected}\n")


@pytest.mark.parametrize("arguments", [["no-such"], ["push"], ["status"], ["push", "a", "http://b", "--mode", "odd"]])
def test_a_wrong_command_line_is_exit_2_and_says_how_to_get_help(run, arguments: list[str]) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert "--help" in ran.words or "-h" in ran.words


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("512M", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("1g", 2**30),
        ("64k", 65536),
        ("1T", 2**40),
        ("123", 123),
        ("123B", 123),
        ("1GB", 10**9),
        ("64kb", 64000),
        ("1.5KiB", 1536),
        ("0.5m", 2**19),
    ],
)
def test_a_size_is_read_as_it_is_commonly_written(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "-1", "1x", "1 2", "nan", "1e3", "0", "0.1", "0x10", "1iB", "1,024", "MiB"])
def test_anything_else_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_size(text)


@given(number=st.integers(1, 2**50), unit=st.sampled_from(["", "k", "m", "g", "t"]), tail=st.sampled_from(["", "ib"]))
def test_a_size_is_exact_at_any_magnitude(number: int, unit: str, tail: str) -> None:
    tail = tail if unit else ""
    assert parse_size(f"{number}{unit}{tail}") == number * 1024 ** " kmgt".index(unit or " ")


def test_headers_are_names_and_values(run) -> None:
    assert parse_headers(["A: b: c", "X-Empty:"]) == {"A": "b: c", "X-Empty": ""}
    for wrong in (["no colon"], [": v"], ["a b: c"], ["A: b\nC: d"], ["A: b", "a: c"]):
        with pytest.raises(typer.BadParameter):
            parse_headers(wrong)


def test_a_malformed_header_is_refused_without_showing_what_may_be_a_credential(run) -> None:
    ran = run("status", "http://127.0.0.1:1", "--header", "Bearer hidden-token")
    assert ran.code == 2
    assert "--header" in ran.words
    assert "hidden-token" not in ran.err


def test_a_wrong_bucket_is_named(run) -> None:
    ran = run("push", "ckpt", "http://127.0.0.1:1", "--bucket", "12parsecs")
    assert ran.code == 2
    assert "--bucket" in ran.words
    assert "12parsecs" in ran.words


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("runs/step-7", "step-7"),
        ("runs/step-7/", "step-7"),
        ("runs/step-7/model.safetensors", "step-7"),
        ("runs/final.safetensors", "final"),
        ("/", "/"),
    ],
)
def test_a_checkpoint_without_a_version_is_called_by_its_directory(path: str, version: str) -> None:
    assert version_of(Path(path)) == version


def test_dots_in_a_checkpoint_path_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step-7" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "step-7" / "inner")
    assert version_of(Path(".")) == "inner"
    assert version_of(Path("..")) == "step-7"


def test_status_of_an_engine_that_is_not_there_is_exit_2_as_text_and_as_json(run, dead_url: str) -> None:
    ran = run("status", dead_url)
    assert (ran.code, ran.out) == (2, "")
    assert "cannot be reached" in ran.words
    assert dead_url in ran.err
    ran = run("status", dead_url, "--json")
    assert (ran.code, ran.err) == (2, "")
    assert ran.json["reachable"] is False
    assert ran.json["weight_version"] is None
    assert dead_url in ran.json["problems"][0]
    assert ran.json["engines"][0]["workers"] == []


def test_push_to_an_engine_that_is_not_there_is_exit_1(run, checkpoint_dirs: dict[str, Path], dead_url: str) -> None:
    ran = run("push", checkpoint_dirs["step-1"], dead_url)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("rankcast: ")
    assert f"{dead_url}: cannot be reached" in ran.words
    ran = run("push", checkpoint_dirs["step-1"], dead_url, "--json")
    assert (ran.code, ran.err) == (1, "")
    assert ran.json["error"]["code"] == "push"
    assert dead_url in ran.json["error"]["faults"][0]


def test_a_failure_of_the_installed_command_has_no_traceback(dead_url: str, tmp_path: Path) -> None:
    for arguments, code in (
        (["push", str(tmp_path / "absent"), dead_url], 1),
        (["status", dead_url], 2),
        (["reference-server", str(tmp_path / "absent"), "--port", "0"], 1),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "rankcast", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment(),
            cwd=tmp_path,
        )
        assert done.returncode == code, done.stderr
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        assert "absent" in done.stderr or dead_url in done.stderr


def test_a_text_that_is_no_url_is_refused_by_name(run, checkpoint_dirs: dict[str, Path]) -> None:
    for command in (["status"], ["push", checkpoint_dirs["step-1"]]):
        ran = run(*command, "no/url", "--json")
        assert ran.code == 1
        assert "no/url" in ran.json["error"]["message"]


@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_a_timeout_that_is_none_is_refused(run, value: str, dead_url: str) -> None:
    assert run("status", dead_url, "--timeout", value).code == 2
    assert run("push", os.devnull, dead_url, "--timeout", value, "--json").code == 1


def test_an_unreadable_secret_file_is_an_error_object(run, dead_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKCAST_SECRET_FILE", "no-such-file")
    ran = run("status", dead_url, "--json")
    assert ran.code == 1
    assert ran.json["error"]["code"] == "authentication"
    assert json.loads(ran.out)["error"]["faults"] == []
