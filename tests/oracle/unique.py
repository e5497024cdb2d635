"""Weights whose bits tell where each element belongs. It knows shapes and element widths, no architecture.

An element's bits are a bijective scramble of its index counted through the whole checkpoint. With 4-byte elements all
bits are distinct (up to 2**32 elements). With b-bit elements, b < 32, only 2**b patterns exist: within each aligned
window of 2**b consecutive elements all are distinct, and each window has a scramble of its own, so that a block moved
by a whole number of windows still differs (a single element may coincide, with chance 2**-b; n elements with 2**-bn).
Every pattern may appear: NaNs of both kinds, infinities, denormals, -0.0.

Steps: an element never has the same bits in two steps (below 2**b steps).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Bits = np.ndarray[Any, Any]

# Odd, so that step * stride never repeats; far from small fractions of 2**b, so that neighbouring steps lie far apart.
_STRIDE = {8: 0x9D, 16: 0x9E37, 32: 0x9E3779B1}
# Odd multipliers and shifts of the scramble; multiplication by an odd number and x ^= x >> n are both invertible.
_ROUNDS = {
    8: ((4, 0x35), (3, 0xA7), (5, 0x01)),
    16: ((8, 0x88B5), (7, 0xDB2D), (9, 0x0001)),
    32: ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 0x00000001)),
}


def unique_bits(shapes: Mapping[str, tuple[int, ...]], element: np.dtype[Any], step: int) -> dict[str, Bits]:
    """Arrays of ``element`` (uint8, uint16 or uint32) for each name, scrambled from one running index over all names.

    Raises ValueError for more than 2**32 four-byte elements, or a step outside ``0 <= step < 2**b``.
    """
    width = 8 * element.itemsize
    if width not in _ROUNDS:
        raise ValueError(f"unique bits exist for elements of 1, 2 and 4 bytes, not {element}")
    if not 0 <= step < 1 << width:
        raise ValueError(f"step {step} is outside 0 .. {(1 << width) - 1}")
    weights: dict[str, Bits] = {}
    start = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape, dtype=np.int64))
        if width == 32 and start + size > 1 << 32:
            raise ValueError("a checkpoint of more than 2**32 four-byte elements has no unique bits")
        index = np.arange(start, start + size, dtype=np.uint64)
        weights[name] = _scramble(index, width, step).astype(element).reshape(shape)
        start += size
    return weights


def _scramble(index: Bits, width: int, step: int) -> Bits:
    mask = np.uint64((1 << width) - 1)
    key = _hash(index >> np.uint64(width))
    bits = index & mask
    # Twice, since two maps x -> a * x + b of one power of two can agree on half of all x.
    for _ in range(2):
        factor = (key & mask) | np.uint64(1)
        offset = key >> np.uint64(64 - width)
        bits = _mix((bits * factor + offset) & mask, width, mask)
        key = _hash(key)
    # The step enters behind everything that depends on the window: equal sums would mean equal steps.
    return _mix((bits + np.uint64(step * _STRIDE[width] & int(mask))) & mask, width, mask)


def _mix(bits: Bits, width: int, mask: Any) -> Bits:
    for shift, factor in _ROUNDS[width]:
        bits = bits ^ (bits >> np.uint64(shift))
        bits = (bits * np.uint64(factor)) & mask
    return bits


def _hash(window: Bits) -> Bits:
    # Sixty-four well-spread bits (the finaliser of splitmix64); products wrap on purpose.
    bits = (window + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
