import pytest

from shardwise.errors import LaunchError
from shardwise.world import JoinedWorld, joined

UNDER_TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "gpu003",
    "MASTER_PORT": "29500",
}
UNDER_SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[003-010,017],login2",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
}


def test_nobody_launched_a_process_of_a_plain_shell():
    assert joined({"PATH": "/bin", "MASTER_ADDR": "left over", "WORLD_SIZE": "8"}) is None


def test_torchrun_is_joined_by_its_variables():
    assert joined(UNDER_TORCHRUN) == JoinedWorld(
        rank=5, world_size=8, local_rank=1, master_address="gpu003", master_port=29500, told_by="RANK"
    )


def test_srun_is_joined_on_the_first_machine_and_a_port_of_the_step():
    assert joined(UNDER_SRUN) == JoinedWorld(
        rank=5, world_size=8, local_rank=1, master_address="gpu003", master_port=24713, told_by="SLURM_PROCID"
    )


def test_srun_takes_master_address_and_port_where_they_are_set():
    world = joined({**UNDER_SRUN, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"})
    assert world is not None
    assert (world.master_address, world.master_port) == ("10.0.0.7", 1234)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("login2", "login2"), ("a1,b[2-3]", "a1"), ("rack[1-2]-node", "rack1-node"), ("gpu[08]", "gpu08")],
)
def test_the_first_machine_of_a_host_list(hosts, first):
    world = joined({**UNDER_SRUN, "SLURM_STEP_NODELIST": hosts})
    assert world is not None
    assert world.master_address == first


def test_an_interactive_shell_and_a_batch_script_of_slurm_are_places_to_launch_from():
    assert joined({**UNDER_SRUN, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    batch_script = {name: value for name, value in UNDER_SRUN.items() if not name.startswith("SLURM_STEP")}
    assert joined(batch_script) is None


def test_ranks_that_torchrun_started_inside_a_task_of_srun_belong_to_torchrun():
    world = joined({**UNDER_SRUN, **UNDER_TORCHRUN})
    assert world is not None
    assert world.told_by == "RANK"


def test_half_a_world_names_the_variables_that_miss():
    with pytest.raises(LaunchError, match="RANK is set to '0', but LOCAL_RANK, MASTER_PORT are not"):
        joined({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"})


def test_a_rank_beyond_its_world_is_refused():
    with pytest.raises(LaunchError, match="rank 8 of a world of 8"):
        joined({**UNDER_TORCHRUN, "RANK": "8"})


def test_a_rank_that_is_no_number_is_refused():
    with pytest.raises(LaunchError, match="LOCAL_RANK is '-1'; it must be a number"):
        joined({**UNDER_TORCHRUN, "LOCAL_RANK": "-1"})
