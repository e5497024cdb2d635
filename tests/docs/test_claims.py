"""What the pages state outside of examples: numbers, limits, names, links, error texts.

It knows where in the code each kind of statement has its truth. It must not repeat that truth.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import rankcast
from docs.markdown_pages import PAGES, ROOT, anchors, links, name_of, prose, table, tables, unquoted
from docs.surroundings import RANKCAST
from fleets import environment
from rankcast.session import OPEN, State
from rankcast.wire.payload import ROUTES

README, DOCS = ROOT / "README.md", ROOT / "docs"
SECONDS = 280.0
#: What differs from run to run in a request: process ids, start times, ports, inodes.
REQUEST_BYTES_TOLERANCE = 0.05
#: In the demo's object, what the README's columns are called.
COLUMNS = {
    "worker calls": "worker_calls",
    "control calls": "control_calls",
    "requests": "requests",
    "payload bytes": "payload_bytes",
    "rounds": "rounds",
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``rankcast demo --json`` prints."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [*RANKCAST, "demo", "--json", "--steps", "2"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=folder,
        env={**environment(), "TMPDIR": str(folder)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


# -- the README's numbers ----------------------------------------------------------------------------------------------


def test_the_table_of_modes_is_what_the_demo_prints(demo: dict[str, Any]) -> None:
    shown = {unquoted(row["mode"]): row for row in table(README, "mode", "payload bytes").rows}
    assert list(shown) == list(demo["modes"])
    for mode, printed in demo["modes"].items():
        for title, field in COLUMNS.items():
            assert number(shown[mode][title]) == printed[field], f"{mode}: {title}"
        assert number(shown[mode]["request bytes"]) == pytest.approx(
            printed["request_bytes"], rel=REQUEST_BYTES_TOLERANCE
        )
        assert number(shown[mode]["seconds"]) > 0
        assert set(shown[mode]) == {"mode", "request bytes", "seconds", *COLUMNS}


def test_the_sentences_around_the_table_are_what_the_demo_prints(demo: dict[str, Any]) -> None:
    text = " ".join(prose(README).split())
    trainer, modes = demo["trainer"], demo["modes"]
    assert f"one push of {trainer['tensors']} tensors, {trainer['nbytes'] / 2**20:.1f} MiB" in text
    assert f"each of the {demo['compared_parameters']} parameters on the {demo['fleet']['workers']} workers" in text
    ratio = modes["broadcast"]["payload_bytes"] / modes["ranklocal"]["payload_bytes"]
    assert f"{ratio:.1f} times less in `ranklocal`" in text
    layout = demo["fleet"]["layout"]
    assert f"{trainer['ranks']} trainer ranks with half of the {2 * trainer['experts_per_rank']} experts" in text
    assert f"{demo['fleet']['workers']} workers (DP{layout['dp']} × TP{layout['tp']}" in text
    assert demo["verified"] is True


def test_calls_are_counted_as_how_it_works_says(demo: dict[str, Any]) -> None:
    text = " ".join(prose(DOCS / "how-it-works.md").split())
    assert "one for each round: 10 and the rounds" in text
    assert "are 5 control calls on each worker" in text
    for printed in demo["modes"].values():
        assert printed["requests"] == 10 + printed["rounds"]
        assert printed["control_calls"] == 5 * demo["fleet"]["workers"]


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_public_names_that_a_page_uses_exist(page: Path) -> None:
    for name in re.findall(r"`rankcast\.(\w+)[`(]", prose(page)):
        assert name in rankcast.__all__, f"{name_of(page)} names rankcast.{name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith(("https://", "mailto:")):
            continue
        path, _, place = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        assert not place or place in anchors(target), f"{name_of(page)} links to {link}"


def test_the_readme_leads_to_every_page() -> None:
    led_to = {(README.parent / link.partition("#")[0]).resolve() for link in links(README)}
    assert [name_of(page) for page in PAGES[1:] if page not in led_to] == []


def test_every_command_is_in_the_readme() -> None:
    from rankcast.cli import app

    shown = {unquoted(row["command"]) for row in table(README, "command", "does").rows}
    assert shown == {f"rankcast {command.name}" for command in app.registered_commands}


def test_package_metadata_has_the_readme() -> None:
    assert re.search(r'^readme = "README.md"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


# -- statements about the code ----------------------------------------------------------------------------------------


def test_limits_are_the_codes() -> None:
    rows = table(DOCS / "how-it-works.md", "limit", "value", "defined as").rows
    for row in rows:
        module, _, name = unquoted(row["defined as"]).rpartition(".")
        held = getattr(importlib.import_module(module), name)
        assert number(row["value"].split()[0]) == held, row["limit"]


def test_transports_route_as_the_page_says() -> None:
    rows = table(DOCS / "rank-local-updates.md", "transport", "today").rows
    assert {unquoted(row["transport"]): row["an entry for each worker"].startswith("yes") for row in rows} == ROUTES


def test_session_states_are_the_codes() -> None:
    rows = table(DOCS / "how-it-works.md", "state", "servable").rows
    assert {unquoted(row["state"]) for row in rows} == {str(state) for state in State}
    assert {str(state) for state in OPEN} == {"started", "prepared", "installing", "installed"}


def test_codes_and_statuses_are_the_errors_own() -> None:
    rows = table(DOCS / "rank-local-updates.md", "refused", "error", "code", "status").rows
    for row in rows:
        error = getattr(rankcast, unquoted(row["error"]))
        assert (unquoted(row["code"]), int(row["status"])) == (error.code, error.status), row["refused"]


@cache
def said_by_the_code() -> str:
    """Every string of the source, with something odd wherever a value is put in."""
    parts: list[str] = []
    for path in (ROOT / "src" / "rankcast").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(node.value)
    return "\n".join(parts)


def test_error_texts_are_the_codes() -> None:
    headings = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(headings) > 20
    assert [text for text in headings if text not in said_by_the_code()] == []


def test_decisions_say_what_why_and_what_it_costs() -> None:
    entries = re.split(r"^### ", prose(DOCS / "decisions.md"), flags=re.MULTILINE)[1:]
    assert len(entries) > 10
    for entry in entries:
        assert [word for word in ("*What.*", "*Why.*", "*Cost.*") if entry.count(word) != 1] == [], entry.split("\n")[0]


def test_every_table_has_even_rows() -> None:
    assert sum(len(one.rows) for page in PAGES for one in tables(page)) > 50


def test_no_page_names_a_path_of_somebodys_machine() -> None:
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(work|root|home|tmp)/", page.read_text()), name_of(page)
