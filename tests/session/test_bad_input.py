"""What a user gets wrong is said at once: what, where, and how to mend it."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import shardwise
from shardwise.errors import BatchError, CaptureError, CheckpointError, LossError, PlanError

EXAMPLE = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def job(**changed):
    given = {
        "model": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)),
        "loss": lambda model, batch: model(batch).pow(2).mean(),
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        "batch_size": 8,
    }
    return shardwise.Job(**{**given, **changed})


def step(asked, plan="auto", batch=EXAMPLE, run=None):
    with shardwise.parallelize(asked, plan, run=run) as session:
        return session.step(batch)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_plan_for_another_number_of_processes_says_how_to_start_it():
    plan = shardwise.make_plan(job(), "2x cpu", EXAMPLE, replicas=2)
    with pytest.raises(
        PlanError, match=r"for 2 devices, but 1 processes run; start it with `shardwise train --devices 2"
    ):
        step(job(), plan)


def test_a_plan_for_gpus_that_are_not_here_says_so():
    plan = shardwise.make_plan(job(), "1x h100-80gb", EXAMPLE)
    with pytest.raises(PlanError, match="has no CUDA device"):
        step(job(), plan)


def test_a_plan_of_another_batch_size_or_precision_is_refused():
    plan = shardwise.make_plan(job(), "1x cpu", EXAMPLE)
    with pytest.raises(PlanError, match="made for batch_size 8, but the job says 16"):
        step(job(batch_size=16), plan)
    with pytest.raises(PlanError, match="made for precision 'fp32', but the job says 'bf16'"):
        step(job(precision="bf16"), plan)


def test_two_optimizers_are_one_job_too_many():
    def both(named):
        return torch.optim.SGD(named, lr=0.1), torch.optim.SGD(named, lr=0.1)

    with pytest.raises(PlanError, match="the two sides of a GAN as two jobs"):
        step(job(optimizer=both), shardwise.make_plan(job(), "1x cpu", EXAMPLE))


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused():
    with pytest.raises(PlanError, match="LBFGS evaluates the loss itself"):
        step(
            job(optimizer=lambda named: torch.optim.LBFGS([p for _, p in named])),
            shardwise.make_plan(job(), "1x cpu", EXAMPLE),
        )


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model, batch: model(batch), "returned a tensor of shape"),
        (lambda model, batch: 1.0, "returned float"),
        (lambda model, batch: shardwise.Mean(model(batch), 8), "Mean.total has shape"),
        (lambda model, batch: shardwise.Mean(model(batch).sum(), 0), "sum to 0"),
        (lambda model, batch: model(batch).mean() / 0, "the loss of step 0 is"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_named(loss, words):
    with pytest.raises(LossError, match=words):
        step(job(loss=loss), shardwise.make_plan(job(), "1x cpu", EXAMPLE))


def test_a_gradient_that_is_not_finite_stops_the_run_and_changes_nothing():
    def loss(model, batch):
        return (model(batch).sum() * 0).sqrt()  # zero, with an infinite slope

    with shardwise.parallelize(job(loss=loss), shardwise.make_plan(job(), "1x cpu", EXAMPLE)) as session:
        with pytest.raises(LossError, match=r"step 0 has norm (nan|inf), though its loss is finite"):
            session.step(EXAMPLE)
        model = session.module
    torch.manual_seed(0)
    assert all(map(torch.equal, model.parameters(), job().model().parameters()))


def test_steps_without_data_say_what_to_give():
    with (
        shardwise.parallelize(job()) as session,
        pytest.raises(BatchError, match=r"session\.steps needs data"),
    ):
        next(session.steps(1))


def test_a_dataset_without_length_is_refused_where_one_is_needed():
    class Endless:
        def __getitem__(self, index):
            return EXAMPLE[0]

    with (
        pytest.raises(BatchError, match="length"),
        shardwise.parallelize(job(), data=Endless()) as session,
    ):
        next(session.steps(1))


def test_an_empty_stream_ends_with_words_and_not_for_ever():
    class Nothing(IterableDataset):
        def __iter__(self):
            return iter(())

    with (
        pytest.raises(BatchError),
        shardwise.parallelize(job(), data=DataLoader(Nothing(), batch_size=8)) as session,
    ):
        next(session.steps(1))


def test_a_batch_that_cannot_be_sliced_names_the_argument():
    plan = shardwise.make_plan(job(), "1x cpu", EXAMPLE, micro_batches=2)
    with pytest.raises(BatchError, match="shape"):
        step(job(), plan, {"x": EXAMPLE, "offsets": torch.zeros(3)})


def test_an_op_without_a_fake_kernel_is_not_cut_and_its_line_is_named():
    library = torch.library.Library("bad_input", "FRAGMENT")
    library.define("halve(Tensor x) -> Tensor")
    library.impl("halve", lambda x: x / 2, "CPU")

    def loss(model, batch):
        return torch.ops.bad_input.halve(model(batch)).pow(2).mean()

    with pytest.raises(PlanError, match=r"(?s)halve.*test_bad_input.py"):
        shardwise.make_plan(job(loss=loss), "2x cpu", EXAMPLE, pipeline=2)


def test_weights_that_do_not_fit_are_named(tmp_path):
    from safetensors.torch import save_file

    plan = shardwise.make_plan(job(), "1x cpu", EXAMPLE)
    with pytest.raises(CheckpointError, match=r"holds no \*.safetensors file"):
        step(job(weights=tmp_path), plan)
    save_file({"0.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"does not hold 3 of the model's tensors: 0\.bias, 2\.weight, 2\.bias"):
        step(job(weights=tmp_path), plan)
    whole = {name: torch.zeros(2) for name in job().build().state_dict()}
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"0.weight has shape \(4, 4\), but \(2,\) in"):
        step(job(weights=tmp_path), plan)


def test_weights_are_filled_from_a_folder(tmp_path):
    from safetensors.torch import save_file

    wanted = {name: torch.full_like(value, 0.5) for name, value in job().build().state_dict().items()}
    save_file(wanted, tmp_path / "model.safetensors")
    plan = shardwise.make_plan(job(), "1x cpu", EXAMPLE)
    frozen = job(weights=tmp_path, optimizer=lambda named: torch.optim.SGD(named, lr=0.0))
    with shardwise.parallelize(frozen, plan) as session:
        session.step(EXAMPLE)
        assert {name: value.tolist() for name, value in session.module.state_dict().items()} == {
            name: value.tolist() for name, value in wanted.items()
        }


def test_a_session_that_is_not_open_says_how_to_open_it():
    with pytest.raises(RuntimeError, match=r"with shardwise\.parallelize"):
        _ = shardwise.parallelize(job()).rank


def test_labels_that_a_scalar_loss_ignores_beside_another_term_are_refused_with_the_lines_to_write():
    def loss(model, batch):
        logits = model(batch["x"])
        return nn.functional.cross_entropy(logits, batch["y"]) + 0.1 * logits.pow(2).mean()

    asked = job(model=lambda: nn.Linear(4, 3), loss=loss)
    batch = {"x": EXAMPLE, "y": torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])}
    plan = shardwise.make_plan(asked, "1x cpu", batch, micro_batches=2)
    assert plan.weighting == "checked"
    step(asked, plan, batch)
    batch["y"][3] = -100
    told = r"a label is -100, which the loss ignores.*shardwise.Mean"
    with pytest.raises(LossError, match=told):
        step(asked, plan, batch)
    with pytest.raises(PlanError, match=told):
        shardwise.make_plan(asked, "1x cpu", batch, micro_batches=2)


def test_a_number_that_keeps_changing_is_asked_for_in_the_batch():
    from shardwise.runtime import capture_chain
    from shardwise.runtime.variants import Variants

    state = {"beta": 0.0}

    def function(model, batch):
        return model(batch).mean() * state["beta"]

    model = job().build()
    variants = Variants(
        function=function, model=model, precision="fp32", device=torch.device("cpu"), stages=1, holders={}, mine=(),
        make_stage=lambda graph, ports, number: None, weighs="as it is",
    )  # fmt: skip
    found = capture_chain(function, model, EXAMPLE, "fp32", torch.device("cpu"), "as it is")
    variants.frozen = found.chain.graph.capture.scalars
    variants.refresh(0)
    for step_number in (1, 2):
        state["beta"] += 0.1
        with pytest.warns(UserWarning, match="captured again"):
            variants.refresh(step_number)
    state["beta"] += 0.1
    with pytest.raises(CaptureError, match=r"step 3.*Pass it in the batch"):
        variants.refresh(3)


def test_a_run_that_finishes_trains():
    data = DataLoader(TensorDataset(EXAMPLE), batch_size=8)
    asked = job(loss=lambda model, batch: model(batch[0]).pow(2).mean())
    with shardwise.parallelize(asked, data=data, run="run") as session:
        losses = [done.loss for done in session.steps(3)]
    assert losses == sorted(losses, reverse=True)
