"""Long series, made short enough for a page: what stands out stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
NUM_BINS = 300


def thin(values: Sequence[float], num_bins: int = NUM_BINS) -> NDArray[np.int64]:
    """Which of the values to draw: of each bin the least, the most and the first that is no number; and both ends."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) <= 2 * num_bins:
        return np.arange(len(array))
    kept = {0, len(array) - 1}
    for places in np.array_split(np.arange(len(array)), num_bins):
        kept |= _extremes(places, array[places])
    return np.array(sorted(kept))


def _extremes(places: NDArray[np.int64], values: Numbers) -> set[int]:
    is_number = np.isfinite(values)
    kept = {int(places[~is_number][0])} if not is_number.all() else set()
    if is_number.any():
        inside, numbers = places[is_number], values[is_number]
        kept |= {int(inside[numbers.argmin()]), int(inside[numbers.argmax()])}
    return kept


def pick(values: Sequence[float], places: NDArray[np.int64]) -> list[float]:
    """The values at these places; infinity cannot be drawn and becomes a gap, as NaN is one."""
    chosen = np.asarray(values, dtype=np.float64)[places]
    return [float(value) for value in np.where(np.isfinite(chosen), chosen, np.nan)]


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """How values are spread, in eight numbers."""

    count: int
    least: float
    p5: float
    p25: float
    middle: float
    p75: float
    p95: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles | None:
        """Of the finite ones; None where there are none."""
        finite = [value for value in values if np.isfinite(value)]
        if not finite:
            return None
        cuts = [float(cut) for cut in np.quantile(finite, [0, 0.05, 0.25, 0.5, 0.75, 0.95, 1])]
        names = ("least", "p5", "p25", "middle", "p75", "p95", "most")
        return cls(count=len(finite), **dict(zip(names, cuts, strict=True)))


def evenly(values: Sequence[float], most: int) -> list[float]:
    """So many of them at most, from all over."""
    if len(values) <= most:
        return list(values)
    return [values[int(place)] for place in np.linspace(0, len(values) - 1, most)]
