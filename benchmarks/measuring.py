"""Compare two ways to do one thing on a noisy machine: in turn, round by round, by the ratio of each round."""

import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing

WARM_UP_ROUNDS = 2


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


def on_two_processes(compare: Callable[..., Any], *arguments: Any) -> Any:
    """What `compare(rank, *arguments)` returns on rank 0 of two processes, of one thread each, that talk over gloo."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_joined, (folder, compare, arguments), nprocs=2)
        return json.loads((Path(folder) / "found.json").read_text())


def _joined(rank: int, folder: str, compare: Callable[..., Any], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    found = compare(rank, *arguments)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def in_turn(runs: Mapping[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each run in each round, on all ranks at once; the slower rank counts. The first rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + WARM_UP_ROUNDS):
        for name, run in runs.items():
            dist.barrier()
            taken = torch.tensor(seconds(run, repeats), dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number >= WARM_UP_ROUNDS:
                times[name].append(float(taken))
    return times


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
