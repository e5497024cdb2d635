"""An in-process engine that a push has to refuse: ``python refused_engine.py CHECKPOINT ANOTHER OPTIONS``.

It prints why connecting was refused, or ``connected``, and fails when that changed what the engine holds or says. A
process of its own for each: some options leave vLLM 0.32 unable to start a second engine where the first one was.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import rankcast
from vllm_engine.inprocess import digests, probe, started_llm


def main(checkpoint: str, another: str, options: str) -> None:
    given = json.loads(options)
    rebalanced = given.pop("enable_eplb", False)
    with started_llm(Path(checkpoint), **given) as llm:
        held, said = digests(llm), probe(llm)
        # vLLM does not start with this on CPU, so it is set in the configuration of the running engine.
        llm.llm_engine.vllm_config.parallel_config.enable_eplb = rebalanced
        try:
            rankcast.connect(llm, another, timeout=60).close()
        except rankcast.RankcastError as refusal:
            why = str(refusal)
        else:
            why = "connected"
        # With it vLLM would not get through a step here.
        llm.llm_engine.vllm_config.parallel_config.enable_eplb = False
        assert digests(llm) == held
        assert probe(llm) == said
    print(why)


if __name__ == "__main__":
    main(*sys.argv[1:])
