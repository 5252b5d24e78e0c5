"""Run a plan."""

from shardwise.runtime.engine import Engine, Step
from shardwise.runtime.mesh import Mesh, Place, make_mesh
from shardwise.runtime.program import Program, forward_program, graph_program, whole_program
from shardwise.runtime.share import Share
from shardwise.runtime.variants import Variant, Variants, capture_chain
from shardwise.runtime.verify import Verdict, verify

__all__ = [
    "Engine",
    "Mesh",
    "Place",
    "Program",
    "Share",
    "Step",
    "Variant",
    "Variants",
    "Verdict",
    "capture_chain",
    "forward_program",
    "graph_program",
    "make_mesh",
    "verify",
    "whole_program",
]
