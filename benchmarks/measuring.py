"""Compare two ways to do one thing on a noisy machine: in turn, round by round, by the ratio of each round."""

import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of times, A over B: the median of all rounds, and where the median lies with 95 % confidence."""

    median: float
    low: float
    high: float
    rounds: int


def ratio(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """The ratio of paired times, with the interval of the sign test (order statistics of the binomial)."""
    ratios = sorted(a / b for a, b in zip(first, second, strict=True))
    rounds = len(ratios)
    reach = int(1.96 * math.sqrt(rounds) / 2 + 0.5)
    low = ratios[max(0, rounds // 2 - reach)]
    high = ratios[min(rounds - 1, rounds // 2 + reach)]
    return Ratio(statistics.median(ratios), low, high, rounds)


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Of one run, on average over `repeats` in a row."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    model = next((line.split(":")[1].strip() for line in _cpu_lines() if line.startswith("model name")), "")
    return {"cpu": model, "system": platform.platform(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}


def _cpu_lines() -> list[str]:
    try:
        with open("/proc/cpuinfo") as lines:
            return lines.read().splitlines()
    except OSError:
        return []
