"""Our runtime against torch.distributed.pipelining by hand: same cut, same schedule, same model, in turn.

    OMP_NUM_THREADS=1 python benchmarks/pipeline_overhead.py [--rounds 30] [--json]

Two processes, 1F1B, 8 micro-batches, an activation of 1 MiB between the stages. Both do whole steps: forward, backward,
SGD. Ours also sums the loss over ranks, takes the norm of the gradient, and agrees on the sizes of the batch.
"""

import argparse
import json
import statistics
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import shardwise
from measuring import Ratio, in_turn, machine, on_two_processes, ratio, seconds
from shardwise.runtime import Share
from shardwise.session.build import build_engine
from shardwise.session.group import join

WIDTH, ROWS, MICRO_BATCHES, LAYERS = 256, 1024, 8, 6


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


# Labels, as of a language model: ours sends them from the rank that loads to the last stage, the other has them there.
cross_entropy = nn.functional.cross_entropy


def compare(rank: int, rounds: int, repeats: int) -> dict[str, Any]:
    torch.manual_seed(1)
    inputs = torch.randn(MICRO_BATCHES * ROWS, WIDTH)
    targets = torch.randint(WIDTH, (MICRO_BATCHES * ROWS,))
    runs = {"ours": _ours(rank, inputs, targets), "theirs": _theirs(rank, inputs, targets)}
    return {**in_turn(runs, rounds, repeats), "stage_ms": _stage_milliseconds() if rank == 0 else 0.0}


def _ours(rank: int, inputs: torch.Tensor, targets: torch.Tensor):
    job = shardwise.Job(
        model=build,
        loss=lambda model, batch: cross_entropy(model(batch["x"]), batch["y"]),
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
        batch_size=len(inputs),
    )
    example = {"x": inputs[:ROWS], "y": targets[:ROWS]}
    plan = shardwise.make_plan(
        job, "2x cpu", example, pipeline=2, micro_batches=MICRO_BATCHES, schedule="1f1b", cuts=[f"before {LAYERS // 2}"]
    )
    engine = build_engine(job, plan, example, join())
    batches = [{"x": x, "y": y} for x, y in zip(inputs.split(ROWS), targets.split(ROWS), strict=True)]
    share = Share(batches if rank == 0 else None, [ROWS] * MICRO_BATCHES, 0, len(inputs))
    return lambda: engine.step(share, 0)


def _theirs(rank: int, inputs: torch.Tensor, targets: torch.Tensor):
    half = LAYERS // 2
    part = build()[rank * half : (rank + 1) * half]
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-3)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=cross_entropy)

    def run() -> None:
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)
        optimizer.step()
        optimizer.zero_grad()

    return run


def _stage_milliseconds() -> float:
    """Forward and backward of one micro-batch through one stage, alone."""
    part, batch = build()[: LAYERS // 2], torch.randn(ROWS, WIDTH)
    times = [seconds(lambda: part(batch).sum().backward(), 1) for _ in range(20)]
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5, help="steps in a row in each round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    times = on_two_processes(compare, options.rounds, options.repeats)
    found: Ratio = ratio(times["ours"], times["theirs"])
    result = {
        "machine": machine(),
        "boundary_bytes": ROWS * WIDTH * 4,
        "stage_ms": times["stage_ms"],
        "ours_ms": 1000 * statistics.median(times["ours"]),
        "theirs_ms": 1000 * statistics.median(times["theirs"]),
        "ratio": asdict(found),
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(f"forward and backward of a micro-batch in a stage: {result['stage_ms']:.1f} ms; boundary 1 MiB")
    print(f"ours {result['ours_ms']:.1f} ms a step, torch.distributed.pipelining {result['theirs_ms']:.1f} ms")
    print(f"ratio {found.median:.3f}, 95 % interval {found.low:.3f} to {found.high:.3f}, {found.rounds} rounds")


if __name__ == "__main__":
    main()
