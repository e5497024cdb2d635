"""Arrays as raw bits: digests and readable differences. It knows no names, layouts or architectures.

Values never count here, only bits: a NaN equals itself, and 0.0 differs from -0.0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

Bits = np.ndarray[Any, Any]

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def as_bits(array: Bits) -> Bits:
    """The same bits as unsigned integers of the same width and shape; contiguous, C order."""
    contiguous = np.ascontiguousarray(array).reshape(array.shape)
    if contiguous.dtype.itemsize not in _UNSIGNED:
        raise ValueError(f"no raw-bit form for {array.dtype}")
    return contiguous.view(_UNSIGNED[contiguous.dtype.itemsize])


def digest(array: Bits) -> str:
    """SHA-256 (hex) of the array's bytes in C order. Neither shape nor dtype enters."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def compare(expected: Mapping[str, Bits], actual: Mapping[str, Bits]) -> list[str]:
    """Every difference as a line, empty when both hold the same names, shapes, widths and bits."""
    lines = [f"{name}: missing, must have shape {bits.shape}" for name, bits in expected.items() if name not in actual]
    lines += [f"{name}: held, and must not be" for name in actual if name not in expected]
    for name, bits in expected.items():
        if name in actual and (line := _difference(as_bits(bits), as_bits(actual[name]))):
            lines.append(f"{name}: {line}")
    return lines


def _difference(expected: Bits, actual: Bits) -> str | None:
    if expected.shape != actual.shape:
        return f"shape {actual.shape}, must be {expected.shape}"
    if expected.dtype != actual.dtype:
        return f"{actual.dtype.itemsize} bytes an element, must be {expected.dtype.itemsize}"
    wrong = np.flatnonzero(expected.ravel() != actual.ravel())
    if not wrong.size:
        return None
    index = tuple(int(i) for i in np.unravel_index(wrong[0], expected.shape))
    digits = 2 * expected.dtype.itemsize
    return (
        f"{wrong.size} of {expected.size} elements differ, the first at {index}: "
        f"holds 0x{int(actual[index]):0{digits}x}, must be 0x{int(expected[index]):0{digits}x}"
    )
