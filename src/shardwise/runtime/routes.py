"""Which values go from which stage to which, in the order in which they travel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from shardwise.graph import Ports
from shardwise.schedule import Links
from shardwise.schedule.actions import Transfer


@final
@dataclass(frozen=True)
class Routes:
    """The values of each link.

    activations:  of (s, t): names of the values that stage t takes from stage s
    gradients:    of (t, s): names of those of them whose gradients go back
    fields:       of each stage: which tensors of the batch it reads
    """

    activations: Mapping[tuple[int, int], tuple[str, ...]]
    gradients: Mapping[tuple[int, int], tuple[str, ...]]
    fields: Sequence[tuple[int, ...]]

    def names(self, transfer: Transfer) -> tuple[str, ...]:
        """The values of an activation or gradient transfer; none where only another graph of the step has some."""
        links = self.activations if transfer.kind == "activation" else self.gradients
        return links.get((transfer.source, transfer.target), ())


def links(graphs: Sequence[Routes]) -> Links:
    """What any of the graphs of a step sends."""
    return Links(
        activations=frozenset(link for each in graphs for link in each.activations),
        gradients=frozenset(link for each in graphs for link in each.gradients),
        batch=frozenset(stage for each in graphs for stage, fields in enumerate(each.fields) if stage and fields),
    )


def routes(stages: Sequence[Ports]) -> Routes:
    """The routes between the stages of a cut graph."""
    activations: dict[tuple[int, int], tuple[str, ...]] = {}
    gradients: dict[tuple[int, int], tuple[str, ...]] = {}
    for target, ports in enumerate(stages):
        for source in sorted(set(ports.sources.values())):
            names = tuple(name for name in ports.inputs if ports.sources[name] == source)
            activations[source, target] = names
            back = tuple(name for name in names if name in ports.differentiable)
            if back:
                gradients[target, source] = back
    return Routes(activations, gradients, [ports.fields for ports in stages])


def whole(fields: int) -> Routes:
    """One stage, which reads every field."""
    return Routes({}, {}, [tuple(range(fields))])
