"""The rules of the house, read from the source: which way imports run, what loads what, and what may not be there.

It knows the floors and the forbidden things; it must not know what any module does.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "rankcast"
ORACLE = ROOT / "tests" / "oracle"

# Lowest first. A module may import its own floor and those below.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "geometry", "manifest", "topology", "process"}),
    frozenset({"plan", "wire", "session"}),
    frozenset({"trace", "telemetry"}),
    frozenset({"transports"}),
    frozenset({"control"}),
    frozenset({"trainer", "rollout"}),
    frozenset({"engines"}),
    frozenset({"cli"}),
    frozenset({"__init__", "__main__"}),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
STRANGERS = frozenset({"trainer", "rollout"})
WITHOUT_TORCH = FLOORS[0] | FLOORS[1]

SURFACE = (
    "Declared",
    "DeclaredSource",
    "IterableSource",
    "ModuleSource",
    "Progress",
    "PushReport",
    "Receiver",
    "SafetensorsSource",
    "Sync",
    "Weight",
    "WeightSource",
    "WeightSyncClient",
    "Worker",
    "connect",
)


def modules(root: Path = SRC) -> list[Path]:
    found = sorted(root.rglob("*.py"))
    assert found, f"no module below {root.relative_to(ROOT)}"
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def dotted_name(path: Path) -> str:
    """`rankcast.wire.codec` for src/rankcast/wire/codec.py, `rankcast.wire` for its __init__."""
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of every import at any depth, under TYPE_CHECKING too."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = dotted_name(path).split(".")
                up = node.level - (path.name == "__init__.py")
                base = ".".join([*package[: len(package) - up], *filter(None, [base])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and called(node) in {"import_module", "__import__"}:
            # A lazy import is an arrow as well.
            for given in node.args[:1]:
                if isinstance(given, ast.Constant) and isinstance(given.value, str):
                    yield node.lineno, given.value


def called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def top_level(path: Path) -> str:
    return path.relative_to(SRC).with_suffix("").parts[0]


def target_of(name: str) -> str | None:
    """The top-level module of rankcast that an imported name lies in; None when it is somebody else's."""
    parts = name.split(".")
    if parts[0] != "rankcast":
        return None
    if len(parts) > 1 and ((SRC / parts[1]).is_dir() or (SRC / f"{parts[1]}.py").is_file()):
        return parts[1]
    return "__init__"


def arrows() -> Iterator[tuple[str, str, str]]:
    """Importing module, imported module (both top-level) and where, for every import inside rankcast."""
    for path in modules():
        for line, name in imported_names(path):
            target = target_of(name)
            if target is not None and target != top_level(path):
                yield top_level(path), target, f"{path.relative_to(ROOT)}:{line} imports {name}"


def calls_by_name(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield node.lineno, called(node)


def loaded_after(code: str, *, cwd: Path) -> set[str]:
    """The modules in sys.modules after `code` ran in a fresh interpreter, away from the checkout."""
    closing = "\nimport json as _json, sys as _sys\n_sys.stdout.write('\\n' + _json.dumps(sorted(_sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(SRC.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code + closing], capture_output=True, text=True, timeout=120, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.rsplit("\n", 1)[1]))


def test_every_top_level_module_has_a_floor() -> None:
    assert {top_level(path) for path in modules()} - FLOOR_OF.keys() == set()


def test_imports_run_downwards_only() -> None:
    upward = [
        where
        for source, target, where in arrows()
        if FLOOR_OF[target] > FLOOR_OF[source] or {source, target} == STRANGERS
    ]
    assert upward == []


def test_no_two_modules_of_one_floor_import_each_other() -> None:
    below: dict[str, set[str]] = {}
    for source, target, _ in arrows():
        below.setdefault(source, set()).add(target)

    def reaches(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            fresh = below.get(todo.pop(), set()) - seen
            seen |= fresh
            todo += fresh
        return seen

    assert [name for name in below if name in reaches(name)] == []


def test_the_lower_floors_name_no_torch() -> None:
    named = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules()
        if top_level(path) in WITHOUT_TORCH
        for line, name in imported_names(path)
        if name.split(".")[0] in {"torch", "safetensors", "transformers", "vllm"}
    ]
    assert named == []


def test_the_lower_floors_load_no_torch(tmp_path: Path) -> None:
    lower = [dotted_name(path) for path in modules() if top_level(path) in WITHOUT_TORCH]
    present = {name.split(".")[1] for name in lower}
    assert present == WITHOUT_TORCH, f"absent: {sorted(WITHOUT_TORCH - present)}"
    assert "torch" not in loaded_after("\n".join(f"import {name}" for name in lower), cwd=tmp_path)


def test_import_rankcast_loads_no_torch(tmp_path: Path) -> None:
    loaded = loaded_after("import rankcast; rankcast.__all__", cwd=tmp_path)
    assert loaded & {"torch", "vllm", "starlette", "uvicorn", "transformers"} == set()


def test_help_loads_neither_torch_nor_an_engine(tmp_path: Path) -> None:
    code = """
import sys
from rankcast.cli import main
sys.argv = ["rankcast", "--help"]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""
    assert loaded_after(code, cwd=tmp_path) & {"torch", "vllm", "starlette", "uvicorn", "transformers"} == set()


@pytest.mark.parametrize("command", [["-m", "rankcast", "--help"], ["-c", "import rankcast.cli"]])
def test_the_command_line_is_there(command: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SRC.parent)}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert ("rankcast" in done.stdout) == ("--help" in command)


def test_nothing_pickles() -> None:
    pickling = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    carriers = {
        "multiprocessing.managers",
        "multiprocessing.Queue",
        "multiprocessing.reduction",
        "torch.multiprocessing",
    }
    calls = {
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
        "send_object_list",
        "recv_object_list",
        "JoinableQueue",
        "ForkingPickler",
    }
    found: list[str] = []
    for path in modules():
        where = path.relative_to(ROOT)
        for line, name in imported_names(path):
            if name.split(".")[0] in pickling or any(name == one or name.startswith(f"{one}.") for one in carriers):
                found.append(f"{where}:{line} imports {name}")
            if name in {"torch.save", "torch.load"}:
                found.append(f"{where}:{line} imports {name}")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and called(node) in calls:
                found.append(f"{where}:{node.lineno} calls {called(node)}")
            elif isinstance(node, ast.Attribute) and ast.unparse(node) in {"torch.save", "torch.load", *carriers}:
                found.append(f"{where}:{node.lineno} uses {ast.unparse(node)}")
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                found.append(f"{where}:{node.value.lineno} sets allow_pickle")
    assert found == []


def test_only_the_command_line_prints() -> None:
    printing = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules()
        if top_level(path) != "cli"
        for line, name in calls_by_name(path)
        if name == "print"
    ]
    assert printing == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "manager", "managers", "misc"}
    named = {part for path in modules() for part in path.relative_to(SRC).with_suffix("").parts}
    assert {name for name in named if vague & set(name.strip("_").split("_"))} == set()


def test_every_module_says_what_it_is_for() -> None:
    assert [str(path.relative_to(ROOT)) for path in modules() if not ast.get_docstring(tree_of(path))] == []


def test_no_module_is_longer_than_400_lines() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules()}
    assert {name: lines for name, lines in lengths.items() if lines > 400} == {}


def test_the_oracle_imports_nothing_but_numpy_and_safetensors() -> None:
    allowed = sys.stdlib_module_names | {"numpy", "safetensors", "oracle", "rankcast_oracle"}
    foreign = []
    for path in modules(ORACLE):
        for node in ast.walk(tree_of(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(node.module or "")
            if isinstance(node, ast.ImportFrom) and node.level > len(path.relative_to(ORACLE).parts):
                names.append("." * node.level)
            if isinstance(node, ast.Call) and called(node) in {"import_module", "__import__"}:
                names.append(ast.unparse(node))
            foreign += [f"{path.relative_to(ROOT)}: {name}" for name in names if name.split(".")[0] not in allowed]
    assert foreign == []


def test_the_oracle_that_ships_is_the_one_the_tests_use() -> None:
    # A link in a checkout and a second copy in a source distribution: only what it says counts.
    shipped = SRC.parent / "rankcast_oracle"
    assert {path.relative_to(shipped): path.read_bytes() for path in modules(shipped)} == {
        path.relative_to(ORACLE): path.read_bytes() for path in modules(ORACLE)
    }


def test_no_file_names_a_path_of_one_machine() -> None:
    # Put together here so that this file does not hold what it looks for.
    homes = "|".join(["wo" + "rk", "ro" + "ot", "tm" + "p"])
    pattern = re.compile(rf"(?<![\w.\-/:}}])/(?:{homes})/\w")
    folders = ("src", "tests", "docs", "examples", "bench", ".ci")
    kinds = {".py", ".md", ".toml", ".txt", ".json", ".yaml", ".yml", ".cfg", ".sh", ""}
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    # In a worktree that git linked, ``.git`` is a file, and not one of the repository's.
    files += [path for path in sorted(ROOT.iterdir()) if path.name not in ("LICENSE", ".git")]
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        if path.is_file() and path.suffix in kinds
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert named == []


def error_classes() -> dict[str, type]:
    errors = importlib.import_module("rankcast.errors")
    return {
        name: member
        for name, member in inspect.getmembers(errors, inspect.isclass)
        if member.__module__ == errors.__name__ and not name.startswith("_")
    }


def test_every_error_is_a_rankcast_error_and_says_when_it_is_raised() -> None:
    errors = error_classes()
    root = errors["RankcastError"]
    assert [name for name, error in errors.items() if not issubclass(error, root)] == []
    assert [name for name, error in errors.items() if not error.__dict__.get("__doc__")] == []


def test_exported_members() -> None:
    rankcast = importlib.import_module("rankcast")
    assert sorted(rankcast.__all__) == sorted({*SURFACE, *error_classes()})
    assert len(set(rankcast.__all__)) == len(rankcast.__all__)
    for name in rankcast.__all__:
        assert getattr(rankcast, name) is not None
        assert name in dir(rankcast)
