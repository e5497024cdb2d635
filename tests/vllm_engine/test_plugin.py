"""The plugin: harmless when loaded twice, without vLLM, beside another backend; clear when it cannot work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import rankcast
from vllm_engine.conftest import Checkpoints
from vllm_engine.inprocess import flags, started_llm
from vllm_engine.servers import TP1, environment_of, started_server

pytestmark = pytest.mark.vllm

HOOKED = {
    "vllm.v1.worker.gpu_worker:Worker": (
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    ),
    "vllm.v1.engine.core:EngineCore": (
        "collective_rpc",
        "pause_scheduler",
        "reset_prefix_cache",
        "resume_scheduler",
        "sleep",
        "set_weight_version",
    ),
    "vllm.v1.engine.core:EngineCoreProc": ("pause_scheduler",),
    "vllm.v1.engine.core:DPEngineCoreProc": ("resume_scheduler",),
    "vllm.v1.engine.llm_engine:LLMEngine": ("collective_rpc", "add_request", "sleep", "step"),
}


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``code`` in a fresh interpreter that has vLLM's and these tests' environment."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment_of(), **environment},
        check=False,
    )


def test_an_installation_that_lacks_a_package_harms_no_engine_and_says_what_is_missing() -> None:
    done = python(
        """
import logging, sys
logging.basicConfig()
sys.modules["xxhash"] = None
from rankcast.engines.vllm.plugin import register
register()
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
assert "rankcast" not in WeightTransferEngineFactory._registry
"""
    )
    assert done.returncode == 0, done.stderr
    assert "rankcast is not registered as a weight-transfer backend, its installation is broken" in done.stderr
    assert "xxhash" in done.stderr


def test_loading_it_twice_hooks_once() -> None:
    done = python(
        f"""
from importlib import import_module
from rankcast.engines.vllm.plugin import register
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
def depth(function):
    count = 0
    while getattr(function, "__wrapped__", None) is not None:
        function, count = function.__wrapped__, count + 1
    return count
for _ in range(3):
    register()
assert "rankcast" in WeightTransferEngineFactory._registry
for where, names in {HOOKED!r}.items():
    module, _, cls = where.partition(":")
    for name in names:
        assert depth(vars(getattr(import_module(module), cls))[name]) == 1, (where, name)
"""
    )
    assert done.returncode == 0, done.stderr


def test_without_vllm_it_does_nothing() -> None:
    # An entry of None is how Python itself says that a module cannot be imported.
    done = python(
        """
import sys
sys.modules["vllm"] = None
from rankcast.engines.vllm.plugin import register
register()
register()
assert not [name for name in sys.modules if name.startswith("vllm.")]
"""
    )
    assert done.returncode == 0, done.stderr


def test_a_release_that_was_not_tested_is_named(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.45.1")
    with pytest.raises(rankcast.UnsupportedError, match=r"needs vLLM 0\.\d+.*, found 0\.45\.1"):
        with started_llm(checkpoints("llama", "a")):
            pass


def test_a_release_whose_insides_have_other_names_is_named_all_the_same() -> None:
    done = python(
        """
import vllm
vllm.__version__ = "0.45.1"
import vllm.distributed.weight_transfer.base as base
import vllm.v1.worker.gpu_worker as gpu_worker
del base.WeightTransferInitInfo, gpu_worker.Worker
from rankcast.engines.vllm.plugin import register
register()
from types import SimpleNamespace
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
try:
    WeightTransferEngineFactory.create_engine(SimpleNamespace(backend="rankcast"), None, None, None)
except Exception as refusal:
    print(f"{type(refusal).__name__}: {refusal}")
"""
    )
    assert done.returncode == 0, done.stderr
    assert "UnsupportedError: rankcast needs vLLM 0.32, found 0.45.1" in done.stdout


def test_a_vllm_that_cannot_be_hooked_serves_other_backends_and_refuses_this_one() -> None:
    done = python(
        """
import logging
logging.basicConfig()
from types import SimpleNamespace
from vllm.v1.worker.gpu_worker import Worker
del Worker.finish_weight_update
from rankcast.engines.vllm.plugin import register
register()
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
try:
    WeightTransferEngineFactory.create_engine(SimpleNamespace(backend="rankcast"), None, None, None)
except Exception as refusal:
    print(f"{type(refusal).__name__}: {refusal}")
"""
    )
    assert done.returncode == 0, done.stderr
    assert "UnsupportedError: rankcast could not hook into this vLLM" in done.stdout
    assert "rankcast cannot be a weight-transfer backend of this vLLM: KeyError: 'finish_weight_update'" in done.stderr


def test_filtered_out_by_vllm_plugins_the_server_says_what_is_missing(checkpoints: Checkpoints) -> None:
    # vLLM knows nothing of rankcast then, so the words are vLLM's own: they name the backend that it does not find.
    with pytest.raises(RuntimeError, match="Invalid weight transfer backend: rankcast"):
        with started_server(checkpoints("llama", "a"), TP1, environment={"VLLM_PLUGINS": "another"}):
            pass


def test_another_backend_is_left_as_vllm_made_it(checkpoints: Checkpoints) -> None:
    with started_llm(checkpoints("llama", "a"), backend="ipc") as llm:
        with pytest.raises(RuntimeError, match="start_weight_update must be called before update_weights"):
            llm.update_weights({"update_info": {"names": []}})
        with pytest.raises(RuntimeError, match="finish_weight_update called without a matching"):
            llm.finish_weight_update()
        with pytest.raises(ValueError, match=r"init_info|[Ii]nvalid|unexpected|IPC"):
            llm.init_weight_transfer_engine({"init_info": {"surprise": 1}})
        llm.start_weight_update()
        (state,) = flags(llm)
        assert state["active"]
        assert state["state"] is None
        with pytest.raises(RuntimeError, match="already active"):
            llm.start_weight_update()
        llm.finish_weight_update()
        llm.sleep(level=0)
        llm.wake_up(tags=["scheduling"])


def test_without_a_backend_vllm_answers_as_before(checkpoints: Checkpoints) -> None:
    with started_llm(checkpoints("llama", "a"), backend=None) as llm:
        for call in (llm.start_weight_update, llm.finish_weight_update):
            with pytest.raises(RuntimeError, match=r"[Ww]eight transfer"):
                call()
        with pytest.raises(rankcast.RankcastError) as refused:
            rankcast.connect(llm, checkpoints("llama", "b"), timeout=60)
        assert "weight_transfer" in str(refused.value) or "eight transfer" in str(refused.value)


def test_no_file_of_vllm_is_imported_before_it_is_asked_for() -> None:
    done = python(
        """
import sys
import rankcast.engines.vllm.plugin, rankcast.engines.vllm.unsupported, rankcast.engines.vllm.installer
import rankcast.engines.vllm.adapter.identity, rankcast.engines.vllm.adapter.reload
import rankcast.engines.vllm.core_hooks, rankcast.engines.vllm.worker_hooks, rankcast.engines.vllm.llm_hooks
assert "vllm" not in sys.modules
"""
    )
    assert done.returncode == 0, done.stderr
