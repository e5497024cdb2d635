"""What stands for the weight-transfer engine where rankcast cannot be one, as on a release that it was not tested with.

This module knows that such an engine cannot be. It must not know anything of vLLM, of which any name may have changed.
"""

from __future__ import annotations

from rankcast.engines.vllm.adapter import unsupported_version
from rankcast.errors import UnsupportedError


class UnsupportedEngine:
    """Raises ``UnsupportedError`` ("needs vLLM ..., found ...") instead of being created."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        why = unsupported_version() or (
            "rankcast could not hook into this vLLM: its warning in the log of this process, at the start, says why"
        )
        raise UnsupportedError(why)
