"""Reading a model's ``config.json``: typed look-ups that fail by name.

This module knows spellings of settings that are in circulation. It must not know what they are for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankcast.errors import UnsupportedError
from rankcast.manifest import canonical_dtype


def number(config: Mapping[str, Any], *names: str, default: int | None = None, least: int = 1) -> int:
    """The first of ``names`` that is set; raises ``UnsupportedError`` when none is, or it is no number in range."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UnsupportedError(f"config.json has {name} = {value!r}: it must be a whole number from {least} on")
        return value
    if default is None:
        raise UnsupportedError(f"config.json has no {names[0]}: give the whole config.json of a checkpoint")
    return default


def flag(config: Mapping[str, Any], name: str) -> bool:
    """A setting that is on or off; absent means off."""
    return bool(config.get(name, False))


def numbers(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """A list of numbers; absent means empty."""
    value = config.get(name) or ()
    if not isinstance(value, list | tuple) or not all(isinstance(each, int) for each in value):
        raise UnsupportedError(f"config.json has {name} = {value!r}: it must be a list of numbers")
    return tuple(value)


def dtype(config: Mapping[str, Any]) -> str:
    """The checkpoint's dtype, canonical; bfloat16 where it says none."""
    value = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return canonical_dtype(str(value))


def head_dim(config: Mapping[str, Any]) -> int:
    """A head's size, which older configs leave to follow from the others."""
    hidden, count = number(config, "hidden_size"), number(config, "num_attention_heads")
    return number(config, "head_dim", default=max(hidden // count, 1))
