"""Every fenced block of the README and of docs/ is run, or read by what reads it in earnest.

Python blocks of a page run one after another in one namespace, those for ``torchrun`` each by itself. Commands run, or
where they last too long, are parsed by the command line's own parser. JSON goes through the decoder that its fence
names. Only ``text`` is not looked at.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer.main

from docs.markdown_pages import PAGES, ROOT, Block, blocks, name_of
from docs.surroundings import RANKCAST, URL, Surroundings, train_step
from fleets import environment
from rankcast.cli import app
from rankcast.engines.reference.layout import Layout
from rankcast.engines.vllm.plugin import BACKEND
from rankcast.topology import Worker
from rankcast.wire.bodies import EntryBody, InitBody
from rankcast.wire.codec import Codec, decode
from rankcast.wire.payload import bare_entry, check_addressee, is_own, pick

BLOCKS = [block for page in PAGES for block in blocks(page)]
SECONDS = 120.0
#: These run until they are told to end, or longer than an example may: their options are parsed.
LASTING = {"demo", "reference-server"}
#: The second word of a block that is a trainer's script of several ranks.
TORCHRUN = "torchrun"
#: What such a script takes from its reader.
MY_TRAINER = Path(__file__).with_name("my_trainer.py")


def of(language: str) -> list[Block]:
    found = [block for block in BLOCKS if block.language == language]
    assert found, f"no page has a block of {language}"
    return found


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    known = {"python", "sh", "json", "mermaid", "text"}
    assert [f"{block}: {block.words}" for block in BLOCKS if block.language not in known] == []


@pytest.mark.parametrize("page", sorted({block.page for block in of("python")}))
def test_python_runs(page: str, surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {"__name__": "page", "model": surroundings.model(), "train_step": train_step}
    ran = 0
    for block in of("python"):
        if block.page == page and TORCHRUN not in block.words:
            # As many empty lines before it as the page has, so that a traceback names the page's own line.
            text = "\n" * (block.line - 1) + surroundings.fill(block.text)
            exec(compile(text, page, "exec"), namespace)
            ran += 1
    assert ran


def test_a_trainer_of_several_ranks_runs_by_its_page_s_command(surroundings: Surroundings, tmp_path: Path) -> None:
    (script,) = [block for block in of("python") if TORCHRUN in block.words]
    (line,) = [line for block in of("sh") for line in block.text.splitlines() if line.startswith("torchrun ")]
    arguments = shlex.split(line)[1:]
    (tmp_path / arguments[-1]).write_text(surroundings.fill(script.text))
    shutil.copy(MY_TRAINER, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment(),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert [text.split(":")[0] for text in done.stdout.splitlines()] == ["step-0", "step-1", "step-2"]
    assert status(surroundings.url)["weight_version"] == "step-2"


def test_the_readmes_trainer_pushed_into_the_engine(
    surroundings: Surroundings, capsys: pytest.CaptureFixture[str]
) -> None:
    block = next(block for block in of("python") if block.page == "README.md")
    namespace = {"model": surroundings.model(), "train_step": train_step}
    exec(compile(surroundings.fill(block.text), block.page, "exec"), namespace)
    assert surroundings.url in surroundings.fill(block.text)
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["step-0", "step-1", "step-2"]
    said = status(surroundings.url)
    assert said["weight_version"] == "step-2"
    assert len(said["engines"][0]["workers"]) == 4


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_commands_run(block: Block, surroundings: Surroundings) -> None:
    lines = [line for line in block.text.splitlines() if line.strip() and not line.startswith("#")]
    assert lines
    for line in lines:
        words = shlex.split(line, comments=True)
        variables = {}
        while words[0] != "VLLM_SERVER_DEV_MODE=1" and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = surroundings.fill(value)
        match words:
            case ["make", target]:
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
            case ["rankcast", command, *arguments]:
                parsed(command, arguments)
                if command not in LASTING:
                    run([command, *shlex.split(surroundings.fill(shlex.join(arguments)))], variables)
            case ["VLLM_SERVER_DEV_MODE=1", "vllm", "serve", _, "--weight-transfer-config", config]:
                # The same is started in earnest by tests/vllm_engine.
                assert json.loads(config) == {"backend": BACKEND}
            case ["curl", "-X", "POST", url]:
                # Only vLLM has these routes; tests/vllm_engine sends the page's own requests.
                assert url.startswith(f"{URL}/"), line
            case ["torchrun", *_]:
                pass  # in a test of its own, with its script
            case ["pip", "install", "."]:
                assert (ROOT / "pyproject.toml").is_file()
            case ["export", setting]:
                name = setting.partition("=")[0]
                assert any(name in path.read_text() for path in (ROOT / "src" / "rankcast").rglob("*.py")), line
            case _:
                pytest.fail(f"{block}: nothing tests {line!r}")


def test_the_engine_that_the_pages_start_is_the_one_that_is_tested(surroundings: Surroundings) -> None:
    lines = [line for block in of("sh") for line in block.text.splitlines() if "reference-server" in line]
    assert lines
    for line in lines:
        options = parsed("reference-server", shlex.split(line, comments=True)[2:])
        layout = Layout(
            tp=options["tp"], dp=options["dp"], pp=options["pp"], expert_parallel=options["expert_parallel"]
        )
        assert layout == Layout(dp=2, tp=2, expert_parallel=True)
        assert options["port"] == 8000


def parsed(command: str, arguments: list[str]) -> dict[str, Any]:
    """What the real command makes of its arguments; raises click's errors for any that it does not take."""
    group = typer.main.get_command(app)
    found = group.commands[command]  # type: ignore[attr-defined]  # a group, by its callback
    with found.make_context(command, list(arguments)) as context:
        return dict(context.params)


def run(arguments: list[str], variables: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [*RANKCAST, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**environment(), **(variables or {})},
        cwd=ROOT,
    )
    assert done.returncode == 0, f"rankcast {shlex.join(arguments)}\n{done.stdout}{done.stderr}"
    return done.stdout


def status(url: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(["status", url, "--json"]))
    return found


# -- JSON ------------------------------------------------------------------------------------------------------------


def read_payload(value: Any) -> None:
    """Each worker picks its entry, opens it, and finds that it is the one it is for."""
    assert is_own(value)
    for rank in value["entries"]:
        entry = Codec().open(pick(value, worker(rank)), EntryBody, what="the page's entry")
        check_addressee(entry, worker(rank))


def worker(rank: str) -> Worker:
    return Worker(engine="5f0c" * 8, rank=int(rank), workers=2)


def read_error(value: Any) -> None:
    """The embedded server's own answer has the same fields."""
    assert set(value) == {"error"}
    assert set(value["error"]) == {"code", "message", "faults"}
    assert all(set(row) == {"worker", "rank", "code", "message", "tensor", "state"} for row in value["error"]["faults"])


READERS: dict[str, Callable[[Any], object]] = {
    "bare-entry": bare_entry,
    "payload": read_payload,
    "entry-body": lambda value: decode(msgspec.json.encode(value), EntryBody, what="the page's body"),
    "init-body": lambda value: decode(msgspec.json.encode(value), InitBody, what="the page's body"),
    "error": read_error,
}


@pytest.mark.parametrize("block", of("json"), ids=str)
def test_json_is_what_its_decoder_takes(block: Block) -> None:
    (kind,) = block.words[1:]
    READERS[kind](json.loads(block.text))


@pytest.mark.parametrize("block", of("mermaid"), ids=str)
def test_diagrams_use_declared_participants_and_close_what_they_open(block: Block) -> None:
    first, *lines = [line.strip() for line in block.text.splitlines()]
    assert first == "sequenceDiagram"
    declared: set[str] = set()
    depth = 0
    for line in lines:
        if match := re.fullmatch(r"participant (\w+) as [\w ]+", line):
            declared.add(match[1])
        elif match := re.fullmatch(r"(?:Note over (\w+),(\w+)|(\w+)--?>>(\w+)): [^;#]+", line):
            assert set(match.groups()) - {None} <= declared, line
        elif line.startswith("loop "):
            depth += 1
        else:
            assert line == "end", line
            depth -= 1
        assert depth >= 0
    assert depth == 0


def test_the_pages_there_are() -> None:
    expected = {"README.md", *(f"docs/{name}.md" for name in ("rank-local-updates", "how-it-works", "decisions"))}
    assert expected <= {name_of(page) for page in PAGES}
