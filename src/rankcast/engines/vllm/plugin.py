"""The entry point that vLLM loads in every one of its processes, any number of times.

This module knows how to register the backend and where to hook in. It must not import vLLM at module level, and must do
no harm where vLLM is absent, older, newer, or configured with another backend.
"""

from __future__ import annotations

import logging
import os
import secrets

logger = logging.getLogger(__name__)

#: The name users write in ``--weight-transfer-config '{"backend": "rankcast"}'``.
BACKEND = "rankcast"
#: Inherited by the processes that a server spawns, so that all workers of one engine share a random part of their id.
SEED_VARIABLE = "RANKCAST_ENGINE_SEED"


def register() -> None:
    """Register the backend with vLLM; harmless when repeated.

    On a release of vLLM that rankcast was not tested with, a class is registered that needs nothing of vLLM and refuses
    by name when an engine is created: an unknown backend would be a much less helpful error. The same class stands for
    the engine where something cannot be hooked. Where a package that rankcast needs is missing it is not registered.
    Both are said in a warning, and never raised: who serves without rankcast must not notice.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError as missing:
        logger.debug("rankcast is not registered as a weight-transfer backend: %s", missing)
        return
    try:
        from rankcast.engines.vllm.adapter import unsupported_version
        from rankcast.engines.vllm.core_hooks import hook_engine_core
        from rankcast.engines.vllm.installer import LayerwiseInstaller  # noqa: F401  # what engines will need
        from rankcast.engines.vllm.llm_hooks import hook_llm_engine
        from rankcast.engines.vllm.worker_hooks import hook_worker
        from rankcast.rollout.receiver import Receiver  # noqa: F401
    except ImportError as missing:
        logger.warning(
            "rankcast is not registered as a weight-transfer backend, its installation is broken: %s", missing
        )
        return
    os.environ.setdefault(SEED_VARIABLE, secrets.token_hex(16))
    works = unsupported_version() is None
    if works:
        try:
            hook_worker()
            hook_engine_core()
            hook_llm_engine()
        except Exception as fault:  # what is hooked by then does nothing for any other backend
            works = False
            logger.warning(
                "rankcast cannot be a weight-transfer backend of this vLLM: %s: %s", type(fault).__name__, fault
            )
    if BACKEND not in WeightTransferEngineFactory._registry:
        module, name = ("engine", "RankcastEngine") if works else ("unsupported", "UnsupportedEngine")
        WeightTransferEngineFactory.register_engine(BACKEND, f"rankcast.engines.vllm.{module}", name)
