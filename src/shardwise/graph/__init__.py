"""What a model computes: capture, ops, segments, and cutting."""

from shardwise.graph.capture import Capture, autocast, capture
from shardwise.graph.draws import WHOLE, Draws, mix, seeding
from shardwise.graph.ops import Graph, read_graph
from shardwise.graph.pieces import Pieces, Ports, Result, cut, results, take
from shardwise.graph.scalars import scalars
from shardwise.graph.segments import Chain, Segment, chain, segment
from shardwise.graph.shapes import Sizes, shapes
from shardwise.graph.signature import Signature, read
from shardwise.graph.watch import Refusal

__all__ = [
    "WHOLE",
    "Capture",
    "Chain",
    "Draws",
    "Graph",
    "Pieces",
    "Ports",
    "Refusal",
    "Result",
    "Segment",
    "Signature",
    "Sizes",
    "autocast",
    "capture",
    "chain",
    "cut",
    "mix",
    "read",
    "read_graph",
    "results",
    "scalars",
    "seeding",
    "segment",
    "shapes",
    "take",
]
