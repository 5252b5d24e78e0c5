"""What the launcher tells every rank of a run, in environment variables: `shardwise train` sets them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

Output = Literal["progress", "json", "none"]
PREFIX = "SHARDWISE_"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of one run; what a program gives to `parallelize` wins.

    run:          folder of the run
    plan:         a plan file, or "" for the program's own
    save_every:   steps between checkpoints; 0 saves none
    fresh:        start at step 0 even where the folder holds a checkpoint
    tensorboard:  write event files to the run folder
    output:       what rank 0 prints for each step
    """

    run: Path
    plan: str = ""
    save_every: int = 100
    fresh: bool = False
    tensorboard: bool = False
    output: Output = "progress"

    def to_environment(self) -> dict[str, str]:
        return {
            f"{PREFIX}RUN": str(self.run),
            f"{PREFIX}PLAN": self.plan,
            f"{PREFIX}SAVE_EVERY": str(self.save_every),
            f"{PREFIX}FRESH": str(int(self.fresh)),
            f"{PREFIX}TENSORBOARD": str(int(self.tensorboard)),
            f"{PREFIX}OUTPUT": self.output,
        }


def options_from(environment: Mapping[str, str], script: str) -> Options:
    """What the launcher said; without one, the defaults, and a run folder named after `script`."""
    output = environment.get(f"{PREFIX}OUTPUT", "progress")
    assert output in ("progress", "json", "none"), f"{PREFIX}OUTPUT is {output!r}"
    return Options(
        run=Path(environment.get(f"{PREFIX}RUN") or default_run(script)),
        plan=environment.get(f"{PREFIX}PLAN", ""),
        save_every=int(environment.get(f"{PREFIX}SAVE_EVERY", "100")),
        fresh=environment.get(f"{PREFIX}FRESH", "0") == "1",
        tensorboard=environment.get(f"{PREFIX}TENSORBOARD", "0") == "1",
        output=output,  # type: ignore[arg-type]  # one of the three, as checked above
    )


def default_run(script: str) -> Path:
    return Path("runs") / (Path(script).stem or "run")
