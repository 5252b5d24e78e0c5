"""What the user should know of a plan, in words."""

from shardwise.graph import Refusal
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Weighting
from shardwise.plan.sketch import Sketch


def weighting_of(sketch: Sketch) -> Weighting:
    """Of the micro-batches; "unchecked" where the loss could not be captured."""
    if sketch.weighing is None:
        return "unchecked"
    # Refused ones stay whole: there is one micro-batch, whose weight does not matter.
    if isinstance(sketch.weighing, Refusal):
        return "samples"
    return "checked" if sketch.weighing.guards else sketch.weighing.weighting


def sample_weight_of(layout: Layout, sketch: Sketch) -> float:
    """As the run will see it: the module as it is, on a whole batch, keeps a mean that no one needs to take apart."""
    kept = weighting_of(sketch) == "rewritten" and layout.stages == 1 and not layout.splits_the_batch
    return 1.0 if kept else sketch.weight


def notes_of(layout: Layout, sketch: Sketch) -> tuple[str, ...]:
    notes = list(sketch.notes)
    if isinstance(sketch.graph, Refusal):
        notes.append(f"not cut: {sketch.graph}")
        notes.append("memory counts no activations: they are known only of a captured graph")
    if layout.splits_the_batch:
        notes += _notes_of_a_split_batch(sketch)
    if sketch.optimizer.problem:
        notes.append(f"the optimizer could not be probed ({sketch.optimizer.problem}): two values an element assumed")
    return tuple(notes)


def _notes_of_a_split_batch(sketch: Sketch) -> list[str]:
    notes = []
    if sketch.couples:
        notes.append(f"samples couple: {sketch.couples}, so a step differs from one on the whole batch")
    if sketch.weighing is None:
        notes.append(
            "unchecked: a loss that is a scalar counts as a mean over samples; return shardwise.Mean to be sure"
        )
    elif not isinstance(sketch.weighing, Refusal) and sketch.weighing.guards:
        indices = sorted({guard.ignore_index for guard in sketch.weighing.guards})
        notes.append(f"weighed by samples, which is right while no label is {indices[0]}: checked on each batch")
    return notes
