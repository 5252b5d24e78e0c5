"""The devices that cluster text can name, from `catalogue.toml` beside this file."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

from shardwise.cluster.device import GIB, Device, Link

TERA: Final = 1e12
GIGA: Final = 1e9


@cache
def catalogue() -> Mapping[str, Device]:
    """Every device by its kind, as written in cluster text."""
    return {kind: _device(kind, entry) for kind, entry in _entries().items() if kind != "network"}


@cache
def network() -> Link:
    """What one device gets of the wires between two nodes."""
    return _link(_entries()["network"])


def _entries() -> dict[str, Any]:
    return tomllib.loads(files("shardwise.cluster").joinpath("catalogue.toml").read_text(encoding="utf-8"))


def _device(kind: str, entry: Mapping[str, Any]) -> Device:
    return Device(
        name=kind,
        memory_bytes=int(entry["memory_gib"] * GIB),
        flops_per_second={
            "fp32": entry["fp32_tflops"] * TERA,
            "bf16": entry["bf16_tflops"] * TERA,
            "fp16": entry["fp16_tflops"] * TERA,
        },
        bytes_per_second=entry["memory_gb_per_second"] * GIGA,
        link=_link(entry),
    )


def _link(entry: Mapping[str, Any]) -> Link:
    return Link(bytes_per_second=entry["link_gb_per_second"] * GIGA, latency_seconds=entry["link_microseconds"] * 1e-6)
