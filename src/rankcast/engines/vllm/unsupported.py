"""What stands for the weight-transfer engine on a release of vLLM that rankcast was not tested with.

This module knows that such an engine cannot be. It must not know anything of vLLM, of which any name may have changed.
"""

from __future__ import annotations

from rankcast.engines.vllm.adapter import unsupported_version
from rankcast.errors import UnsupportedError


class UnsupportedEngine:
    """Raises ``UnsupportedError`` ("needs vLLM ..., found ...") instead of being created."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise UnsupportedError(str(unsupported_version()))
