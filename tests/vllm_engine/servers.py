"""Real vLLM servers for tests: started on a free port, asked over HTTP, and ended with everything they started.

It knows vLLM's command line and routes; it must not know rankcast's protocol or what a test expects. A server runs in a
session of its own, so that all of its processes are known, dies with the test run, and writes its log to a file whose
end is shown when it does not come up.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from rankcast.cli.demo import leash
from vllm_engine.generation_patches import VARIABLE as PATCHES

SOURCE = Path(__file__).resolve().parents[2] / "src"
SHARED_MEMORY = Path("/dev/shm")
START_SECONDS = 400.0
END_SECONDS = 30.0
CALL_SECONDS = 120.0
#: Token ids; the last is longer than a block of the prefix cache.
PROMPTS: tuple[tuple[int, ...], ...] = (
    (3, 5, 9, 20),
    (100, 7, 44),
    tuple((7 * place + 3) % 500 for place in range(300)),
)

#: Where torch keeps what an engine in the process of the tests has compiled.
_COMPILED = tempfile.TemporaryDirectory(prefix="vc-")
_CACHE = "TORCHINDUCTOR_CACHE_DIR"

Generated = list[tuple[tuple[int, ...], tuple[float, ...]]]


@dataclass(frozen=True)
class Layout:
    """How a server spreads a model; ``patches`` name the test-only patches without which it could not generate."""

    tp: int = 1
    expert_parallel: bool = False
    patches: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "-".join([f"tp{self.tp}{'ep' if self.expert_parallel else ''}", *(f"patched-{p}" for p in self.patches)])

    def arguments(self) -> list[str]:
        return ["-tp", str(self.tp), *(["--enable-expert-parallel"] if self.expert_parallel else [])]


TP1 = Layout()
TP2 = Layout(tp=2)
TP2_EP = Layout(tp=2, expert_parallel=True, patches=("cpu-expert-parallel",))


@dataclass
class VllmServer:
    """A running server. ``session`` is the pid of its first process, and the id of the session of them all."""

    url: str
    session: int
    log: Path
    process: subprocess.Popen[bytes]
    client: httpx.Client = field(repr=False)

    def post(self, route: str, body: object = None, *, timeout: float = CALL_SECONDS, **query: str) -> httpx.Response:
        """One request as any client would make it; the reply is not judged."""
        return self.client.post(self.url + route, json=body, params=query, timeout=timeout)

    def get(self, route: str) -> dict[str, Any]:
        reply = self.client.get(self.url + route, timeout=CALL_SECONDS)
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
        return found

    def rpc(self, method: str, *args: object) -> list[dict[str, Any]]:
        """What ``method`` of the tests' extension says on every worker, by rank."""
        reply = self.post("/collective_rpc", {"method": method, "args": list(args)})
        assert reply.status_code == 200, reply.text
        found: list[dict[str, Any]] = reply.json()["results"]
        return found

    def digests(self) -> list[dict[str, Any]]:
        return self.rpc("read_digests")

    def flags(self) -> list[dict[str, Any]]:
        return self.rpc("read_flags")

    def generate(self, prompt: Sequence[int], tokens: int = 16) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Greedy token ids and their log-probs; raises unless the server answers with ``tokens`` of them."""
        sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 1, "detokenize": False}
        reply = self.post("/inference/v1/generate", {"token_ids": list(prompt), "sampling_params": sampling})
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        ids = tuple(choice["token_ids"])
        assert len(ids) == tokens, choice
        return ids, tuple(place["logprob"] for place in choice["logprobs"]["content"])

    def probe(self) -> Generated:
        """What the server says to the fixed prompts, one after the other."""
        return [self.generate(prompt) for prompt in PROMPTS]

    def pids(self) -> list[int]:
        """All processes of the server that are alive."""
        return sorted(
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _session(pid) == self.session
        )

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@contextlib.contextmanager
def started_server(
    checkpoint: Path,
    layout: Layout = TP1,
    *,
    backend: str = "rankcast",
    extra: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    certificate: Path | None = None,
    api_key: str | None = None,
) -> Iterator[VllmServer]:
    """A server of ``checkpoint`` that answers; raises ``RuntimeError`` with the end of its log when it does not start.

    ``extra`` are further arguments, ``environment`` goes over the usual one. With ``certificate``, a file with its key
    as well, it speaks TLS, and with ``api_key`` it wants that of whoever generates; the record's client has both.
    """
    trust: ssl.SSLContext | bool = True
    headers: dict[str, str] = {}
    if certificate is not None:
        trust = ssl.create_default_context(cafile=certificate)
        extra = [*extra, "--ssl-keyfile", str(certificate), "--ssl-certfile", str(certificate)]
    if api_key is not None:
        headers = bearer(api_key)
        extra = [*extra, "--api-key", api_key]
    room = Path(tempfile.mkdtemp(prefix="vt-"))
    before = _leftovers()
    try:
        for attempt in range(3):
            log = room / f"log-{attempt}"
            port = _free_port()
            process = _spawn(checkpoint, layout, backend, extra, environment or {}, port, room, log)
            try:
                # After a 500 vLLM's server closes the connection, now or a little later: none is used twice.
                limits = httpx.Limits(max_keepalive_connections=0)
                with httpx.Client(trust_env=False, limits=limits, verify=trust, headers=headers) as client:
                    scheme = "http" if certificate is None else "https"
                    server = VllmServer(f"{scheme}://127.0.0.1:{port}", process.pid, log, process, client)
                    if _came_up(server):
                        yield server
                        return
                    said = server.tail(250)  # workers say why first, and then every process above them fails
            finally:
                _end(process)
            if "address already in use" not in said.lower():
                raise RuntimeError(f"vLLM did not come up (exit {process.returncode}):\n{said}")
        raise RuntimeError("no port stayed free long enough to start vLLM")
    finally:
        shutil.rmtree(room, ignore_errors=True)
        for path in _leftovers() - before:
            path.unlink(missing_ok=True)


def bearer(api_key: str) -> dict[str, str]:
    """The header in which a server's ``--api-key`` comes."""
    return {"Authorization": f"Bearer {api_key}"}


def environment_of(patches: Sequence[str] = ()) -> dict[str, str]:
    """What vLLM needs on a machine without network, and what these tests need in every one of its processes."""
    return {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(SOURCE.parent / "tests")]),
        # Every new process would spend ten seconds on compiling how log-probs are ranked; no weight comes near that.
        "TORCHDYNAMO_DISABLE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        PATCHES: ",".join(patches),
        _CACHE: os.environ.get(_CACHE, _COMPILED.name),
    }


def _spawn(
    checkpoint: Path,
    layout: Layout,
    backend: str,
    extra: Sequence[str],
    environment: Mapping[str, str],
    port: int,
    room: Path,
    log: Path,
) -> subprocess.Popen[bytes]:
    own = {"VLLM_SERVER_DEV_MODE": "1", "TMPDIR": str(room)}
    command = [sys.executable, "-P", str(leash.__file__), str(os.getpid()), sys.executable, "-m"]
    command += ["vllm.entrypoints.openai.api_server", "--model", str(checkpoint), "--served-model-name", "m"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--max-model-len", "512", "--max-num-seqs", "4", "--max-num-batched-tokens", "512"]
    command += [
        "--kv-cache-memory-bytes",
        str(64 * 2**20),
        "--enable-prefix-caching",
        "--skip-tokenizer-init",
        "--enable-scale-out",
    ]
    command += ["--weight-transfer-config", f'{{"backend": "{backend}"}}']
    command += ["--worker-extension-cls", "vllm_engine.breaking.Breaking", *layout.arguments(), *extra]
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment_of(layout.patches), **own, **environment},
            start_new_session=True,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _came_up(server: VllmServer) -> bool:
    """Whether the server answers before it ends or its time is up."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if server.client.get(server.url + "/health", timeout=5.0).status_code == 200:
                return True
        try:
            server.process.wait(0.2)  # returns at once when the server ends
        except subprocess.TimeoutExpired:
            continue
        return False
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _session(pid: int) -> int:
    try:
        fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return 0
    return 0 if fields[0] in "ZX" else int(fields[3])


def _leftovers() -> set[Path]:
    """What vLLM leaves in shared memory when it ends."""
    return set(SHARED_MEMORY.glob("vllm_dist_*"))
