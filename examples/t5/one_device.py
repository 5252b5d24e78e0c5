"""Train a T5 of transformers, from a small config, to restore what was cut out of the docstrings of Python's library.

Bytes are tokens, as in ByT5. All are padded to one length; the loss is the mean over the labels that are no padding:
how many those are differs from batch to batch.
"""

import argparse
import ast
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

PAD, END, FIRST_BYTE = 0, 1, 3
FIRST_SENTINEL, SENTINELS = FIRST_BYTE + 256, 4
IGNORED = -100
LONGEST, LONGEST_LABELS = 80, 40
DOCSTRINGS = 2_000
BATCH = 16

Example = tuple[Tensor, Tensor]


def build() -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=FIRST_SENTINEL + SENTINELS,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def examples() -> list[Example]:
    """Docstrings with spans cut out, each with the spans: "Return <0> lower case.<end>", "<0>a copy in<end>"."""
    draw = random.Random(0)
    return [_cut_spans(text, draw) for text in _docstrings()]


def _docstrings() -> list[bytes]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    found: list[bytes] = []
    for file in files:
        found += _docstrings_of(ast.parse(file.read_bytes()))
        if len(found) >= DOCSTRINGS:
            break
    return found[:DOCSTRINGS]


def _docstrings_of(tree: ast.Module) -> Iterator[bytes]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
            yield text.encode()[: LONGEST - 1]


def _cut_spans(text: bytes, draw: random.Random) -> Example:
    source, target, end = [], [], 0
    for number, start in enumerate(sorted(draw.sample(range(len(text)), min(SENTINELS, len(text) // 8)))):
        if start < end:
            continue
        source += [FIRST_BYTE + byte for byte in text[end:start]] + [FIRST_SENTINEL + number]
        end = start + draw.randint(2, 8)
        target += [FIRST_SENTINEL + number] + [FIRST_BYTE + byte for byte in text[start:end]]
    source += [FIRST_BYTE + byte for byte in text[end:]]
    return torch.tensor([*source, END]), torch.tensor([*target, END])


def collate(samples: Sequence[Example]) -> dict[str, Tensor]:
    source = torch.stack([_padded(source, LONGEST, PAD) for source, _ in samples])
    labels = torch.stack([_padded(target, LONGEST_LABELS, IGNORED) for _, target in samples])
    return {"input_ids": source, "attention_mask": (source != PAD).long(), "labels": labels}


def _padded(tokens: Tensor, length: int, padding: int) -> Tensor:
    return functional.pad(tokens, (0, length - len(tokens)), value=padding)


def make_loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(examples(), batch_size=BATCH, shuffle=True, generator=generator, collate_fn=collate)


def make_optimizer(parameters: Iterable[Any]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def train(steps: int) -> None:
    torch.manual_seed(0)
    model = build()
    optimizer = make_optimizer(model.parameters())
    for step, batch in zip(range(1, steps + 1), make_loader(), strict=False):
        value = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step}  loss {value.item():.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    train(arguments.steps)


if __name__ == "__main__":
    main()
