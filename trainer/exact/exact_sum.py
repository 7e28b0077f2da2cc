"""Sums of floats without rounding: the same whatever the order, and whoever adds which part.

Every finite float64 is a whole multiple of 2**-1074, the smallest one, so a sum of them is a whole
number of these units, and Python's integers have as many digits as it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

UNIT_EXPONENT = 1074
_HALF = 27  # binary digits, of the 53 that a float64 has
# A float64 has less than 2**(1024 + 1074) units; what is left of 67 * 32 bits, after the sign, is
# enough for 2**45 values. A sum of 32-bit limbs over the ranks stays far below the end of an int64.
_LIMBS = 67
_LIMB_BITS = 32
_BYTES = _LIMBS * _LIMB_BITS // 8
_MODULUS = 1 << 8 * _BYTES

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ExactSum:
    """A sum of float64 values.

    Attributes:
        units: The sum of the finite values, in units of 2**-1074.
        highs: How many values are infinity or NaN.
        lows: How many values are minus infinity or NaN.
    """

    units: int = 0
    highs: int = 0
    lows: int = 0

    @classmethod
    def of(cls, values: Sequence[float] | FloatArray) -> ExactSum:
        """Add up ``values``, of which there may be 2**26."""
        array = np.asarray(values, dtype=np.float64)
        highs = lows = units = 0
        finite = np.isfinite(array)
        if not finite.all():
            others, array = array[~finite], array[finite]
            highs, lows = int((~(others < 0)).sum()), int((~(others > 0)).sum())
        if array.size:
            # By exponent, each fraction's upper and lower half: sums of these round nothing.
            fractions, exponents = np.frexp(array)
            smallest = int(exponents.min())
            fractions = np.ldexp(fractions, _HALF)
            uppers = np.floor(fractions)
            lowers = np.ldexp(fractions - uppers, _HALF)
            kinds = exponents - smallest
            halves = (np.bincount(kinds, part).tolist() for part in (uppers, lowers))
            for exponent, (upper, lower) in enumerate(zip(*halves, strict=True), smallest):
                shift = UNIT_EXPONENT + exponent - 2 * _HALF
                total = (int(upper) << _HALF) + int(lower)
                units += total << shift if shift >= 0 else total >> -shift  # what goes is 0
        return cls(units, highs, lows)

    def state(self) -> list[Any]:
        """Return plain values for `restored`."""
        # As a string: torch.load(weights_only=True) refuses integers of more than 255 bytes.
        return [hex(self.units), self.highs, self.lows]

    @classmethod
    def restored(cls, state: Sequence[Any]) -> ExactSum:
        """Return the sum that `state` was called on."""
        units, highs, lows = state
        return cls(int(units, 16), highs, lows)

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(self.units + other.units, self.highs + other.highs, self.lows + other.lows)

    def __bool__(self) -> bool:
        """Whether the sum is other than 0."""
        return self != ExactSum()

    def __float__(self) -> float:
        """Return the nearest float; NaN or infinite if the values make the sum so."""
        if self.highs or self.lows:
            return math.nan if self.highs and self.lows else math.inf if self.highs else -math.inf
        return _quotient(self.units, 1 << UNIT_EXPONENT)

    def __truediv__(self, other: ExactSum) -> float:
        """Return the float that is nearest to the true quotient."""
        if self.highs or self.lows or other.highs or other.lows:
            return float(self) / float(other)
        return _quotient(self.units, other.units)


def pack(sums: Sequence[ExactSum]) -> torch.Tensor:
    """Return an int64 tensor of a row per sum; the sum of such tensors is that of the sums."""
    rows = np.zeros((len(sums), _LIMBS + 2), dtype=np.int64)
    for row, part in zip(rows, sums, strict=True):
        # In two's complement, modulo _MODULUS, so that negative sums add up as they are.
        row[:_LIMBS] = np.frombuffer(part.units.to_bytes(_BYTES, "little", signed=True), "<u4")
        row[_LIMBS:] = part.highs, part.lows
    return torch.from_numpy(rows)


def unpack(packed: torch.Tensor) -> list[ExactSum]:
    """Return the sums that `pack` put into ``packed``, or into the tensors that add up to it."""
    rows = packed.numpy()
    limbs = rows[:, :_LIMBS]
    sums = []
    for low, carry, (highs, lows) in zip(
        limbs.astype("<u4"),  # the last 32 bits
        (limbs >> _LIMB_BITS).astype("<u4"),
        rows[:, _LIMBS:].tolist(),
        strict=True,
    ):
        units = (_whole(low) + (_whole(carry) << _LIMB_BITS)) % _MODULUS
        sums.append(ExactSum(units - _MODULUS if units >= _MODULUS // 2 else units, highs, lows))
    return sums


def _whole(limbs: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> int:
    return int.from_bytes(limbs.tobytes(), "little")


def _quotient(a: int, b: int) -> float:
    try:
        return a / b  # correctly rounded, however large the integers are
    except OverflowError:
        return math.inf if (a > 0) == (b > 0) else -math.inf
