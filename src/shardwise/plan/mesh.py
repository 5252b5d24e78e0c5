"""How the devices can be arranged: pipeline x replicas x shards, those first that change least for the user."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, final

from shardwise.errors import PlanError


@final
@dataclass(frozen=True, slots=True)
class Mesh:
    pipeline: int
    replicas: int
    shards: int

    @property
    def data_ranks(self) -> int:
        return self.replicas * self.shards

    @property
    def kind(self) -> Literal["replicas", "shards", "pipeline"]:
        """By what it does to the model: nothing, shares of every parameter, or stages."""
        if self.pipeline > 1:
            return "pipeline"
        return "shards" if self.shards > 1 else "replicas"

    def __str__(self) -> str:
        parts = [
            (self.pipeline, "pipeline ranks"),
            (self.replicas, "replicas"),
            (self.shards, "shards"),
        ]
        return " x ".join(f"{count} {name}" for count, name in parts if count > 1) or "one device"


def meshes(devices: int, pipeline: int | None, replicas: int | None, shards: int | None) -> list[Mesh]:
    """All meshes of `devices` with the given sizes, in the order in which to try them.

    Replicas alone come first: they run the module as it is. Then few shards, then few pipeline ranks, then both.
    raises:  PlanError where the given sizes do not divide the devices
    """
    given = {"pipeline": pipeline, "replicas": replicas, "shards": shards}
    asked = {name: size for name, size in given.items() if size is not None}
    for name, size in asked.items():
        if size < 1:
            raise PlanError(f"{name} is {size}; give 1 or more, or leave it out")
    product = 1
    for size in asked.values():
        product *= size
    if devices % product or (len(asked) == 3 and product != devices):
        sizes = " x ".join(f"{size} {_NAMES[name]}" for name, size in asked.items())
        raise PlanError(
            f"{sizes} do not share out {devices} devices; their product must divide {devices}, and be {devices} where "
            "all three are given"
        )
    found = [mesh for mesh in _all(devices) if _agrees(mesh, asked)]
    return sorted(found, key=lambda mesh: (mesh.pipeline > 1, mesh.pipeline * mesh.shards, mesh.shards))


_NAMES = {"pipeline": "pipeline ranks", "replicas": "replicas", "shards": "shards"}


def _all(devices: int) -> Iterator[Mesh]:
    for pipeline in range(1, devices + 1):
        if devices % pipeline:
            continue
        rest = devices // pipeline
        yield from (Mesh(pipeline, rest // shards, shards) for shards in range(1, rest + 1) if rest % shards == 0)


def _agrees(mesh: Mesh, asked: dict[str, int]) -> bool:
    sizes = {"pipeline": mesh.pipeline, "replicas": mesh.replicas, "shards": mesh.shards}
    return all(sizes[name] == size for name, size in asked.items())
