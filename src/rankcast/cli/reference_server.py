"""``rankcast reference-server``: the embedded fleet by itself, until it is told to end.

This module knows the command's options and what it prints. It must not know how the fleet works, and loads nothing of
it before it runs.
"""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankcast.engines.reference.fleet import Fleet


def reference_server(
    checkpoint: Path,
    *,
    tp: int = 1,
    dp: int = 1,
    pp: int = 1,
    expert_parallel: bool = False,
    port: int = 8000,
    host: str = "127.0.0.1",
    json: bool = False,
) -> None:
    """Serve CHECKPOINT, a qwen3_moe directory, on vLLM's RL routes until SIGINT or SIGTERM.

    Prints the URL once it answers, as a line of its own, or with ``json`` as one JSON object with ``url``,
    ``engine_id``, ``pid``, ``workers`` (their pids) and ``layout``. ``port`` 0 takes any free one. The secret is
    that of RANKCAST_SECRET or RANKCAST_SECRET_FILE. Raises ``RankcastError`` when it cannot start.
    """
    import msgspec

    from rankcast.engines.reference.serve import serve
    from rankcast.process import this_process
    from rankcast.wire.codec import find_secret

    def ready(fleet: Fleet, url: str) -> None:
        facts = {
            "url": url,
            "engine_id": fleet.engine,
            "pid": this_process().pid,
            "workers": fleet.pids(),
            "layout": msgspec.to_builtins(fleet.layout),
        }
        print(json_text.dumps(facts) if json else url, file=sys.stdout, flush=True)

    serve(
        checkpoint,
        tp=tp,
        pp=pp,
        dp=dp,
        expert_parallel=expert_parallel,
        host=host,
        port=port,
        secret=find_secret(),
        ready=ready,
    )
