"""Two replicas against the ceiling of this machine: two independent processes at once, each with half of the batch.

    OMP_NUM_THREADS=1 python benchmarks/replica_scaling.py [--rounds 15] [--json]

A GPT of 21 million parameters, one core for each process. The ceiling communicates nothing; replicas sum 84 MB
of gradients in each step. The figure is the ceiling's time over ours: 1 would be free communication.
"""

import argparse
import json
import statistics
from dataclasses import asdict

import torch
from torch import nn
from torch.nn import functional

import shardwise
from measuring import in_turn, machine, on_two_processes, ratio
from shardwise.runtime import Share
from shardwise.session.build import build_engine
from shardwise.session.group import join

WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH, SAMPLES = 512, 6, 8, 4096, 64, 9  # SAMPLES of each process


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        parts = self.qkv(self.norm_1(x)).view(samples, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(ids) + self.position.weight[: ids.shape[1]])))


def loss(model: nn.Module, ids: torch.Tensor) -> shardwise.Mean:
    logits = model(ids[:, :-1])
    total = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    return shardwise.Mean(total, ids[:, 1:].numel())


def compare(rank: int, rounds: int, repeats: int) -> dict[str, list[float]]:
    ids = torch.randint(VOCABULARY, (2 * SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    runs = {"ours": _ours(rank, ids), "ceiling": _alone(ids[rank * SAMPLES : (rank + 1) * SAMPLES])}
    return in_turn(runs, rounds, repeats)


def _ours(rank: int, ids: torch.Tensor):
    job = shardwise.Job(
        model=GPT, loss=loss, optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4), batch_size=len(ids)
    )
    plan = shardwise.make_plan(job, "2x cpu", ids[:2], replicas=2, micro_batches=1)
    engine = build_engine(job, plan, ids[:2], join())
    share = Share([ids[rank * SAMPLES : (rank + 1) * SAMPLES]], [SAMPLES], rank, len(ids))
    return lambda: engine.step(share, 0)


def _alone(ids: torch.Tensor):
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> None:
        found = loss(model, ids)
        (found.total / found.weight).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=1, help="steps in a row in each round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    times = on_two_processes(compare, options.rounds, options.repeats)
    found = ratio(times["ceiling"], times["ours"])
    result = {
        "machine": machine(),
        "parameters": sum(p.numel() for p in GPT().parameters()),
        "ours_seconds": statistics.median(times["ours"]),
        "ceiling_seconds": statistics.median(times["ceiling"]),
        "efficiency": asdict(found),
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{result['parameters'] / 1e6:.1f} million parameters")
    print(f"two replicas {result['ours_seconds']:.3f} s a step")
    print(f"two independent processes {result['ceiling_seconds']:.3f} s a step")
    print(f"efficiency {found.median:.3f}, 95 % interval {found.low:.3f} to {found.high:.3f}, {found.rounds} rounds")


if __name__ == "__main__":
    main()
