import random

import pytest
import torch
from plan_jobs import CLASSES, FEATURES, Net, batch, job, labels, squares
from torch import nn

from shardwise.cluster import parse_cluster
from shardwise.cost import Analytic
from shardwise.errors import ClusterError, LossError, PlanError
from shardwise.job import Mean
from shardwise.plan import make_plan, positions
from shardwise.plan.cuts import place_cuts
from shardwise.plan.layout import Layout
from shardwise.plan.mesh import Mesh
from shardwise.plan.seconds import _costs, _played, step_seconds
from shardwise.plan.sections import cut_into_sections
from shardwise.plan.sketch import sketch_job


def drawing_in_python(model, batch):
    return squares(model, batch) * random.random()


class WithNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


class OverNeighbours(nn.Module):
    """[B, D] to [B, 4], a layer of a graph network over four nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, 4)
        self.register_buffer("neighbours", torch.eye(4).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(self.neighbours, self.embed(x).T).T


class Wide(nn.Module):
    """Sixteen matrices of 4 GiB, which AdamW takes to 256 GiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2**15, 2**15, bias=False) for _ in range(16)))

    def forward(self, x):
        return self.layers(x)


def wide_loss(model, batch):
    return model(batch).square().mean()


def test_what_fits_is_replicated_and_runs_as_it_is():
    plan = make_plan(job(), "2x cpu", batch())
    assert (plan.pipeline_ranks, plan.replicas, plan.shards, plan.micro_batches) == (1, 2, 1, 1)
    assert (plan.cluster, plan.devices, plan.batch_size, plan.precision) == ("2x cpu", 2, 16, "fp32")
    assert [one.name for one in plan.alternatives] == ["2 shards", "2 pipeline ranks"]
    assert all("predicted" in one.reason for one in plan.alternatives)


def test_a_pipeline_is_cut_in_the_middle_of_equal_blocks():
    plan = make_plan(job(), "2x cpu", batch(), pipeline=2)
    assert [(stage.begins, stage.rank) for stage in plan.stages] == [("", 0), ("before blocks.2", 1)]
    assert (plan.schedule, plan.micro_batches) == ("1f1b", 8)
    assert plan.stages[0].bytes_sent == 2 * FEATURES * 4  # two samples a micro-batch, fp32
    assert plan.stages[1].bytes_sent == 0
    assert plan.stages[1].ends == "head"
    assert plan.fingerprint
    assert plan.step_seconds is not None


@pytest.mark.parametrize("micro_batches", [13, 64])
def test_a_long_step_is_predicted_as_if_it_were_played_whole(micro_batches):
    """The prediction plays three micro-batches a rank and adds the others up; here each is played."""
    cluster, sketch = parse_cluster("3x cpu"), sketch_job(job(batch_size=64), batch())
    bounds = place_cuts(sketch.graph, [1.0] * 3)
    layout = Layout(
        mesh=Mesh(3, 1, 1),
        sections=cut_into_sections(sketch.graph, bounds),
        schedule="1f1b",
        micro_batches=micro_batches,
        samples=1,
        shard_mode="gathered",
        recompute=False,
    )
    whole = _played(layout, _costs(layout, sketch, cluster, Analytic("fp32")), micro_batches)
    assert step_seconds(layout, sketch, cluster, Analytic("fp32")) == pytest.approx(whole, rel=0.02)


def test_flops_are_those_of_a_micro_batch():
    whole = make_plan(job(), "1x cpu", batch())
    halves = make_plan(job(), "1x cpu", batch(), micro_batches=2)
    by_hand = 2 * 16 * (8 * 4 * FEATURES * FEATURES + FEATURES * 8)
    assert whole.stages[0].flops == 3 * by_hand - 2 * 16 * FEATURES * 4 * FEATURES  # the first layer's input needs none
    assert halves.stages[0].flops * 2 == whole.stages[0].flops


def test_a_model_larger_than_a_device_takes_the_fewest_shards_that_fit_and_is_not_built():
    plan = make_plan(job(Wide, wide_loss, 1024), "32x h100-80gb", torch.zeros(2, 2**15), pipeline=1)
    assert (plan.pipeline_ranks, plan.replicas, plan.shards, plan.shard_mode) == (1, 4, 8, "regathered")
    assert 32 * 2**30 < plan.stages[0].memory_bytes < 73 * 2**30
    assert [one.name for one in plan.alternatives] == ["32 replicas", "16 replicas x 2 shards", "8 replicas x 4 shards"]
    assert plan.alternatives[0].reason == "it is short by 183.2 GiB"  # of 256, with 0.92 x 79.1 usable


def test_of_shards_and_pipeline_that_fit_the_faster_is_taken_and_the_other_is_told():
    plan = make_plan(job(Wide, wide_loss, 1024), "32x h100-80gb", torch.zeros(2, 2**15))
    assert (plan.pipeline_ranks, plan.replicas, plan.shards) == (4, 8, 1)
    assert max(stage.memory_bytes for stage in plan.stages) < 73 * 2**30
    other = plan.alternatives[-1]
    assert other.name == "4 replicas x 8 shards"
    assert other.reason.endswith(f"against {plan.step_seconds:.3g} s")


def test_what_fits_nowhere_says_by_how_much_each_way_is_short():
    with pytest.raises(PlanError, match="no plan for 2x h100-80gb") as error:
        make_plan(job(Wide, wide_loss, 64), "2x h100-80gb", torch.zeros(2, 2**15))
    assert "  2 replicas: it is short by" in str(error.value)
    assert "  2 pipeline ranks: stage 0 is short by" in str(error.value)


def test_a_mesh_that_the_user_fixed_is_planned_though_it_may_be_short():
    plan = make_plan(job(Wide, wide_loss, 64), "2x h100-80gb", torch.zeros(2, 2**15), pipeline=2)
    assert plan.notes[0].startswith("predicted to run out of memory: stage 0 is short by")


def test_interleaving_gives_each_rank_several_stages():
    plan = make_plan(job(), "2x cpu", batch(), pipeline=2, stages_per_rank=2)
    assert (plan.schedule, plan.placement) == ("interleaved-1f1b", (0, 1, 0, 1))
    assert [stage.begins for stage in plan.stages[1:]] == ["before blocks.1", "before blocks.2", "before blocks.3"]


def test_cuts_by_name_are_taken_as_they_are():
    cuts = ["before blocks.1", "before head"]
    plan = make_plan(job(), "3x cpu", batch(), cuts=cuts)
    assert [stage.begins for stage in plan.stages] == ["", *cuts]


def test_a_cut_may_be_inside_a_segment():
    plan = make_plan(job(), "2x cpu", batch(), cuts=["before blocks.1.down"])
    assert plan.stages[0].bytes_sent > 2 * FEATURES * 4


def test_recomputing_keeps_less():
    kept, again = (
        make_plan(job(), "2x cpu", batch(), pipeline=2, schedule="gpipe", recompute=recompute)
        for recompute in (False, True)
    )
    assert again.stages[0].memory_bytes < kept.stages[0].memory_bytes
    assert (kept.stages[0].recompute, kept.recompute, again.recompute) == ((), False, False)
    assert again.stages[0].recompute != ()
    assert again.step_seconds > kept.step_seconds
    assert make_plan(job(), "1x cpu", batch(), recompute=True).recompute


def test_half_precision_keeps_a_copy_of_the_weights_for_each_micro_batch_in_flight():
    """Of 16 micro-batches GPipe holds all and 1F1B two on the first rank: 14 sets of activations and copies more."""
    asked = {"pipeline": 2, "micro_batches": 16}
    full, half = (
        [make_plan(job(precision=precision), "2x cpu", batch(), schedule=schedule, **asked).stages[0].memory_bytes
         for schedule in ("gpipe", "1f1b")]
        for precision in ("fp32", "bf16")
    )  # fmt: skip
    weights = sum(parameter.nbytes for block in list(Net().blocks)[:2] for parameter in block.parameters())
    activations = (full[0] - full[1]) // 14
    assert (full[0] - full[1]) % 14 == (half[0] - half[1]) % 14 == 0
    assert weights // 2 < (half[0] - half[1]) // 14 <= activations + weights // 2


def test_the_slower_device_gets_less():
    plan = make_plan(job(), "1x h100-80gb + 1x l4", batch(), pipeline=2)
    assert plan.stages[0].flops > 2 * plan.stages[1].flops


def test_pipeline_x_replicas_x_shards():
    plan = make_plan(job(), "8x cpu", batch(), pipeline=2, shards=2, shard_mode="regathered", schedule="gpipe")
    assert (plan.pipeline_ranks, plan.replicas, plan.shards) == (2, 2, 2)
    assert (plan.shard_mode, plan.schedule, plan.micro_batches) == ("regathered", "gpipe", 4)


def test_the_same_graph_has_the_same_fingerprint_built_for_real_or_not():
    def reads_values():
        model = Net()
        assert float(model.head.weight.sum()) != 1e9
        return model

    fake, real = (make_plan(job(model), "1x cpu", batch()) for model in (Net, reads_values))
    assert fake.fingerprint == real.fingerprint != ""
    assert any("its factory reads values" in note for note in real.notes)
    assert fake.notes == ()
    assert [stage.memory_bytes for stage in fake.stages] == [stage.memory_bytes for stage in real.stages]


def test_planning_changes_no_random_state():
    before = torch.get_rng_state()
    make_plan(job(), "2x cpu", batch(), pipeline=2)
    assert torch.equal(before, torch.get_rng_state())


# What is asked and cannot be


def refused(**asked) -> str:
    cluster = asked.pop("cluster", "4x cpu")
    given = asked.pop("job", job())
    with pytest.raises(PlanError) as error:
        make_plan(given, cluster, batch(), **asked)
    return str(error.value)


def test_an_unknown_kind_is_an_error_of_the_cluster():
    with pytest.raises(ClusterError, match="did you mean h100-80gb"):
        make_plan(job(), "8x h100", batch())


def test_replicas_that_do_not_divide_the_devices():
    assert "3 replicas do not share out 4 devices" in refused(replicas=3)
    assert "2 pipeline ranks x 1 replicas x 1 shards do not share out 4 devices" in refused(
        pipeline=2, replicas=1, shards=1
    )


def test_a_pipeline_longer_than_the_segments_says_how_many_would_do():
    most = int(refused(pipeline=64, cluster="64x cpu").split("use at most ")[1])
    assert len(make_plan(job(), f"{most}x cpu", batch(), pipeline=most).stages) == most
    assert f"use at most {most}" in refused(pipeline=most + 1, cluster=f"{most + 1}x cpu")


def test_a_batch_smaller_than_its_replicas():
    assert "batch_size 3 is smaller than 4 data ranks x 1 micro-batches = 4" in refused(
        job=job(batch_size=3), replicas=4
    )
    assert "batch_size 16 is smaller than 2 data ranks x 9 micro-batches = 18" in refused(
        pipeline=2, replicas=2, micro_batches=9
    )


def test_a_cut_that_is_not_there_names_the_nearest():
    assert 'no cut "before block.2"; the nearest are "before blocks.2"' in refused(
        cuts=["before block.2"], cluster="2x cpu"
    )
    assert "order cuts as the model runs" in refused(cuts=["before blocks.2", "before blocks.1"], cluster="3x cpu")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"pipeline": 0}, "pipeline is 0; give 1 or more"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"stages_per_rank": 0}, "stages_per_rank is 0"),
        ({"stages_per_rank": 2}, "give pipeline=2 or more"),
        ({"pipeline": 2, "schedule": "interleaved-1f1b"}, "interleaving has two or more stages per rank"),
        ({"pipeline": 2, "stages_per_rank": 2, "schedule": "1f1b"}, "interleaving has two or more stages per rank"),
        ({"pipeline": 2, "cuts": ["before blocks.1", "before head"]}, "2 cuts make 3 stages, but pipeline is 2"),
        ({"stages_per_rank": 2, "cuts": ["before blocks.1", "before head"]}, "2 stages per rank do not divide"),
    ],
)
def test_wishes_that_contradict_each_other(asked, words):
    assert words in refused(**asked)


@pytest.mark.parametrize("value", [3.5, None, "loss"])
def test_a_loss_that_is_no_tensor_is_refused_at_once(value):
    with pytest.raises(LossError, match="return a scalar tensor"):
        make_plan(job(loss=lambda model, batch: value), "1x cpu", batch())


def test_a_loss_that_is_no_scalar_is_refused_at_once():
    with pytest.raises(LossError, match="reduce it to one number"):
        make_plan(job(loss=lambda model, batch: model(batch["x"])), "1x cpu", batch())


# What cannot be cut or split


def test_a_model_that_is_not_cut_is_replicated_and_the_plan_names_the_line():
    plan = make_plan(job(loss=drawing_in_python), "2x cpu", batch())
    assert (plan.replicas, plan.fingerprint, plan.weighting, plan.step_seconds) == (2, "", "unchecked", None)
    assert any("not cut: the loss draws from Python's random generator" in note for note in plan.notes)
    assert any("random.random()" in note for note in plan.notes)


def test_a_pipeline_of_a_model_that_is_not_cut_names_the_line_and_what_runs_instead():
    message = refused(job=job(loss=drawing_in_python), pipeline=2)
    assert "return squares(model, batch) * random.random()" in message
    assert "replicas and shards run it as it is" in message


def test_an_example_of_one_sample_is_not_cut():
    plan = make_plan(job(), "1x cpu", batch(1))
    assert any("give an example of two or more" in note for note in plan.notes)


def test_a_model_that_holds_a_sparse_tensor_is_not_cut():
    def loss(model, batch):
        return model(batch["x"]).square().mean()

    assert make_plan(job(OverNeighbours, loss), "2x cpu", batch()).replicas == 2
    message = refused(job=job(OverNeighbours, loss), pipeline=2)
    assert "neighbours is a torch.sparse_coo tensor, which no stage can hold; make it dense" in message


def test_a_batch_that_couples_is_never_split():
    coupled = job(couple="batch")
    plan = make_plan(coupled, "2x cpu", batch())
    assert (plan.pipeline_ranks, plan.micro_batches, plan.data_ranks) == (2, 1, 1)
    assert 'couple="batch"' in refused(job=coupled, replicas=4)
    assert 'couple="batch"' in refused(job=coupled, pipeline=4, micro_batches=2)


def test_batch_norm_in_training_is_noted_where_the_batch_is_split():
    def loss(model, batch):
        return model(batch["x"]).square().mean()

    split, whole = (make_plan(job(WithNorm, loss), f"{devices}x cpu", batch()) for devices in (2, 1))
    assert any("samples couple: BatchNorm" in note for note in split.notes)
    assert whole.notes == ()


def test_an_optimizer_of_whole_matrices_is_not_sharded():
    muon = job(
        lambda: nn.Sequential(nn.Linear(FEATURES, 4, bias=False)),
        lambda model, batch: model(batch["x"]).square().mean(),
        optimizer=lambda named: torch.optim.Muon(named),
    )
    assert "the optimizer steps the rows of a matrix together" in refused(job=muon, shards=4)


def test_an_optimizer_that_cannot_be_probed_is_not_cut():
    closure = job(optimizer=lambda named: torch.optim.LBFGS([parameter for _, parameter in named]))
    assert "cannot step a part of the parameters by itself" in refused(job=closure, pipeline=4)
    assert any("could not be probed" in note for note in make_plan(closure, "1x cpu", batch()).notes)


# How micro-batches are weighed


@pytest.mark.parametrize(
    ("loss", "weighting"),
    [
        (squares, "samples"),
        (labels, "rewritten"),
        (lambda model, batch: Mean(model(batch["x"]).sum(), batch["mask"].sum()), "declared"),
        (lambda model, batch: (squares(model, batch), {"error": 1.0}), "samples"),
    ],
)
def test_a_plan_says_how_its_micro_batches_are_weighed(loss, weighting):
    assert make_plan(job(loss=loss), "1x cpu", batch()).weighting == weighting


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        (squares, 1.0),
        (labels, 0.75),
        (lambda model, batch: Mean(model(batch["x"]).sum(), batch["target"].numel()), CLASSES),
        (lambda model, batch: Mean(model(batch["x"]).sum(), batch["mask"].sum()), 0.25),
        (lambda model, batch: Mean(model(batch["x"]).sum(), 0 * batch["mask"].sum()), 1.0),
        (lambda model, batch: Mean(model(batch["x"]).sum(), model(batch["x"]).square().sum()), 1.0),
    ],
)
def test_a_plan_says_what_a_sample_of_the_example_weighs_where_the_batch_tells(loss, weight):
    example = batch()
    example["label"][:2] = -100
    example["mask"] = torch.arange(8) % 4 == 0
    assert make_plan(job(loss=loss), "2x cpu", example, replicas=2).sample_weight == weight
    assert make_plan(job(loss=loss), "2x cpu", example, pipeline=2, micro_batches=1).sample_weight == weight


def test_a_mean_that_stays_whole_is_taken_apart_by_nobody():
    example = batch()
    example["label"][:2] = -100
    assert make_plan(job(loss=labels), "1x cpu", example).sample_weight == 1.0


def test_a_loss_that_cannot_be_weighed_runs_whole_and_is_refused_in_parts():
    def regularised(model, batch):
        each = model(batch["x"]).square().mean(1)
        return (each * batch["mask"]).sum() / batch["mask"].sum() + model.head.weight.square().mean()

    assert "return shardwise.Mean(total, weight)" in refused(job=job(loss=regularised), replicas=4)
    assert make_plan(job(loss=regularised), "1x cpu", batch()).micro_batches == 1


def test_a_guard_is_noted():
    def with_penalty(model, batch):
        return labels(model, batch) + model.head.weight.square().mean()

    plan = make_plan(job(loss=with_penalty), "2x cpu", batch())
    assert plan.weighting == "checked"
    assert any("right while no label is -100" in note for note in plan.notes)


def test_positions_of_a_plan_are_found_again_by_name():
    plan = make_plan(job(), parse_cluster("4x cpu"), batch(), pipeline=4)
    chain = sketch_job(job(), batch()).graph
    bounds = positions(plan, chain)
    assert bounds[0] == 0
    assert [chain.name(position) for position in bounds[1:]] == [stage.begins for stage in plan.stages[1:]]
