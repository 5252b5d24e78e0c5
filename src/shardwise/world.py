"""Whether a launcher has started this process already, read from the environment alone."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.errors import LaunchError


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedWorld:
    """The place of this process in a world that another launcher made.

    local_rank:  place on this machine, from 0: the index of its device
    told_by:     the variable that gave it away: `RANK` from torchrun, Ray and the like, `SLURM_PROCID` from srun
    """

    rank: int
    world_size: int
    local_rank: int
    master_address: str
    master_port: int
    told_by: Literal["RANK", "SLURM_PROCID"]


def joined(environment: Mapping[str, str]) -> JoinedWorld | None:
    """The world that `environment` says we are in, or None where nobody has launched us.

    One task of srun alone is no world: `srun --pty bash` and the batch script of sbatch are places to launch from.

    raises:  LaunchError where the variables contradict each other or some are missing
    """
    if "RANK" in environment:
        return _joined_by_rank(environment)
    if "SLURM_STEP_ID" in environment and environment.get("SLURM_NTASKS", "1") != "1":
        return _joined_by_srun(environment)
    return None


def _joined_by_rank(environment: Mapping[str, str]) -> JoinedWorld:
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in environment]
    if missing:
        raise LaunchError(
            f"RANK is set to {environment['RANK']!r}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            "not: unset RANK to launch from here, or set them all as torchrun does"
        )
    return _checked(
        JoinedWorld(
            rank=_number(environment, "RANK"),
            world_size=_number(environment, "WORLD_SIZE"),
            local_rank=_number(environment, "LOCAL_RANK"),
            master_address=environment["MASTER_ADDR"],
            master_port=_number(environment, "MASTER_PORT"),
            told_by="RANK",
        )
    )


def _joined_by_srun(environment: Mapping[str, str]) -> JoinedWorld:
    return _checked(
        JoinedWorld(
            rank=_number(environment, "SLURM_PROCID"),
            world_size=_number(environment, "SLURM_NTASKS"),
            local_rank=_number(environment, "SLURM_LOCALID"),
            master_address=environment.get("MASTER_ADDR") or _first_host(environment),
            master_port=_step_port(environment),
            told_by="SLURM_PROCID",
        )
    )


def _first_host(environment: Mapping[str, str]) -> str:
    """The machine of task 0: the first of a list such as `gpu[003-010,017],login2`."""
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    match = re.match(r"(?P<prefix>[^,\[]+)(?:\[(?P<first>\d+)[^\]]*\](?P<suffix>[^,\[]*))?", hosts)
    if match is None:
        raise LaunchError(
            f"srun started this process, but SLURM_STEP_NODELIST={hosts!r} names no machine; "
            "set MASTER_ADDR to the machine of task 0"
        )
    return "".join(part or "" for part in match.group("prefix", "first", "suffix"))


def _step_port(environment: Mapping[str, str]) -> int:
    """MASTER_PORT; else a port that the tasks of a step agree on without talking, and steps side by side do not share.

        20000 + (job + step) mod 10000

    Below 32768, from where Linux takes the ports of outgoing connections.
    """
    if "MASTER_PORT" in environment:
        return _number(environment, "MASTER_PORT")
    return 20_000 + (_number(environment, "SLURM_JOB_ID") + _number(environment, "SLURM_STEP_ID")) % 10_000


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None:
        raise LaunchError(f"srun started this process, but {name} is not set; start it with srun itself")
    if not text.isdecimal():
        raise LaunchError(f"{name} is {text!r}; it must be a number from 0")
    return int(text)


def _checked(world: JoinedWorld) -> JoinedWorld:
    if world.rank >= world.world_size:
        raise LaunchError(
            f"this process is rank {world.rank} of a world of {world.world_size} ({world.told_by} and its size "
            f"contradict each other); ranks go from 0 to {world.world_size - 1}"
        )
    return world
