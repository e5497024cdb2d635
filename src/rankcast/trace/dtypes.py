"""Canonical dtype names and torch's dtype objects, both ways.

This module knows that the names in ``manifest.DTYPES`` are torch's own. It must not know what any tensor is for. An
older torch may lack some of the dtypes; asking for one of those is refused like an unknown name.
"""

from __future__ import annotations

import torch

from rankcast.errors import ManifestError
from rankcast.manifest import DTYPES, canonical_dtype

#: Canonical name -> torch dtype, for the dtypes that this torch has.
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called ``name`` (with or without torch's prefix).

    Raises ``ManifestError`` when the name is unknown, or known but not to this version of torch.
    """
    short = canonical_dtype(name)
    try:
        return TORCH_DTYPES[short]
    except KeyError:
        raise ManifestError(f"torch {torch.__version__} has no dtype {short}: install a newer torch") from None


def dtype_name(dtype: torch.dtype) -> str:
    """The canonical name of ``dtype``; raises ``ManifestError`` for one that rankcast does not move (quantised)."""
    return _NAMES.get(dtype) or canonical_dtype(str(dtype))
