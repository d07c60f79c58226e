"""Interleaved rounds: what slows the machine for a while slows all contenders, not one. And what is made of them."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

__all__ = ["against", "in_turn", "medians", "timed"]

_K = TypeVar("_K", bound="Hashable")


def in_turn(names: Sequence[_K], rounds: int) -> list[_K]:
    """Return names for so many rounds, each round beginning with the next: nobody is always first."""
    return [names[(first + place) % len(names)] for first in range(rounds) for place in range(len(names))]


def medians(seconds: Mapping[_K, Sequence[float]]) -> dict[_K, float]:
    """Return the median of each contender."""
    return {name: statistics.median(each) for name, each in seconds.items()}


def against(seconds: Sequence[float], floor: Sequence[float]) -> tuple[float, float | None]:
    """Return how many times the floor it takes on average, and the standard error of that; None for a single round."""
    both = seconds, floor
    means = [statistics.mean(each) for each in both]
    ratio = means[0] / means[1]
    if len(seconds) == 1:
        return ratio, None
    spreads = (statistics.stdev(each) / mean for each, mean in zip(both, means, strict=True))
    return ratio, ratio * math.hypot(*spreads) / math.sqrt(len(seconds))


def timed(contenders: Mapping[_K, Callable[[], object]], rounds: int) -> dict[_K, float]:
    """Return each contender's median seconds; a first round warms up and does not count."""
    found: dict[_K, list[float]] = {name: [] for name in contenders}
    for number, name in enumerate(in_turn(list(contenders), rounds + 1)):
        gc.collect()
        began = time.perf_counter()
        contenders[name]()
        if number >= len(contenders):
            found[name].append(time.perf_counter() - began)
    return medians(found)
