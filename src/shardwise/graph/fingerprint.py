"""Tell graphs apart across processes, devices and machines."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from shardwise.graph.regions import region_body


def fingerprint(module: fx.GraphModule) -> str:
    """A hash of the ops, their order and their plain arguments; devices left out."""
    digest = hashlib.blake2b(digest_size=12)
    for line in _lines(module):
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _lines(module: fx.GraphModule) -> Iterator[str]:
    """One for each node; the lines of a region stand before the op that runs it."""
    number: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        number[node] = len(number)
        body = region_body(module, node)
        if body is not None:
            yield from _lines(body)
        arguments = pytree.tree_map(_plain_argument(number), (node.args, node.kwargs))
        yield f"{node.op} {_what(node)} {arguments}"


def _what(node: fx.Node) -> str:
    if node.op == "get_attr":
        return str(node.meta.get("name", ""))
    # The text of a function of the user's holds its address, which is another one in each process.
    return node.target.__qualname__ if isinstance(node.target, FunctionType) else str(node.target)


def _plain_argument(number: Mapping[fx.Node, int]) -> Callable[[Any], Any]:
    def plain(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return f"%{number[argument]}"
        return "device" if isinstance(argument, torch.device) else repr(argument)

    return plain
