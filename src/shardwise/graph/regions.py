"""Regions: what runs under `no_grad` or another autocast is one op of the graph, with a graph of its own inside."""

from collections.abc import Iterator
from operator import attrgetter

from torch import fx


def inner_ops(module: fx.GraphModule, node: fx.Node) -> Iterator[fx.Node]:
    """The ops inside `node` of the graph of `module`, in order, those of regions inside its regions too."""
    for source in node.all_input_nodes:
        body = region_body(module, source)
        if body is not None:
            for inner in body.graph.nodes:
                if inner.op == "call_function":
                    yield inner
                    yield from inner_ops(body, inner)


def region_body(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """What `node` of the graph of `module` stands for, where that is the body of a region."""
    value = attrgetter(str(node.target))(module) if node.op == "get_attr" else None
    return value if isinstance(value, fx.GraphModule) else None
