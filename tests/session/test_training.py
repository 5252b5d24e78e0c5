"""What a session does to the model, against the loop that a user would write by hand."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise

EXAMPLE = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(model, batch):
    return model(batch).float().pow(2).mean()


def job(**changed):
    given = {"model": build, "loss": loss, "optimizer": lambda named: torch.optim.SGD(named, lr=0.1), "batch_size": 8}
    return shardwise.Job(**{**given, **changed})


def by_hand(steps, *, dtype=None, clip=None, scheduler=None):
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = scheduler(optimizer) if scheduler else None
    for _ in range(steps):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            value = loss(model, EXAMPLE)
        value.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if plan:
            plan.step()
    return model


def trained(asked, steps=3):
    plan = shardwise.make_plan(asked, "1x cpu", EXAMPLE)
    with shardwise.parallelize(asked, plan) as session:
        reports = [session.step(EXAMPLE) for _ in range(steps)]
        return session.module, reports


def assert_same(model, other, tolerance=1e-6):
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_one_stage_is_the_loop_by_hand():
    assert_same(trained(job())[0], by_hand(3))


def test_bf16_runs_under_autocast_and_keeps_the_parameters_type():
    model, _ = trained(job(precision="bf16"))
    assert_same(model, by_hand(3, dtype=torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_fp16_scales_the_loss_and_takes_the_scale_out_again():
    model, reports = trained(job(precision="fp16"))
    assert_same(model, by_hand(3, dtype=torch.float16), tolerance=1e-3)
    assert reports[-1].metrics == {"loss_scale": 2.0**16, "skipped": 0.0}


def test_an_overflow_in_fp16_skips_the_step_and_halves_the_scale():
    def steep(model, batch):
        return loss(model, batch) * 1e38  # times the scale: beyond what float32 holds

    asked = job(precision="fp16", loss=steep, optimizer=lambda named: torch.optim.SGD(named, lr=0.0))
    model, reports = trained(asked, steps=1)
    assert reports[0].metrics == {"loss_scale": 2.0**15, "skipped": 1.0}
    assert_same(model, by_hand(0), tolerance=0.0)


def test_clipping_is_that_of_torch():
    assert_same(trained(job(clip_grad_norm=0.01))[0], by_hand(3, clip=0.01))


def test_the_scheduler_steps_with_the_optimizer_and_the_rate_of_a_step_is_reported():
    def halve(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    model, reports = trained(job(scheduler=halve))
    assert_same(model, by_hand(3, scheduler=halve))
    assert [report.learning_rate for report in reports] == [0.1, 0.05, 0.025]


def test_groups_by_name_train_differently():
    def groups(named):
        weights = [p for name, p in named if name.endswith("weight")]
        return torch.optim.SGD([{"params": weights, "lr": 0.1}], lr=0.0)

    model, _ = trained(job(optimizer=groups))
    start, ended = by_hand(0), model
    moved = {name: not torch.equal(p, dict(start.named_parameters())[name]) for name, p in ended.named_parameters()}
    assert moved == {"0.weight": True, "0.bias": False, "2.weight": True, "2.bias": False}


def test_what_is_frozen_later_stays():
    plan = shardwise.make_plan(job(), "1x cpu", EXAMPLE)
    with shardwise.parallelize(job(), plan) as session:
        session.step(EXAMPLE)
        session.module[0].requires_grad_(False)
        kept = session.module[0].weight.clone()
        moving = session.module[2].weight.clone()
        session.step(EXAMPLE)
        assert torch.equal(session.module[0].weight, kept)
        assert not torch.equal(session.module[2].weight, moving)


def test_recomputing_changes_nothing():
    def deep():
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)) for _ in range(3)))

    models = []
    for again in (False, True):
        asked = job(model=deep)
        plan = shardwise.make_plan(asked, "1x cpu", EXAMPLE, recompute=again)
        assert plan.recompute == again
        with shardwise.parallelize(asked, plan) as session:
            for _ in range(3):
                session.step(EXAMPLE)
            models.append(session.module.state_dict())
    assert {name: value.tolist() for name, value in models[0].items()} == {
        name: value.tolist() for name, value in models[1].items()
    }


def test_evaluation_and_prediction_leave_the_model_in_training():
    data = DataLoader(TensorDataset(EXAMPLE[:5]), batch_size=2)
    asked = job(loss=lambda model, batch: (loss(model, batch[0]), {"largest": model(batch[0]).max()}))
    with shardwise.parallelize(asked, data=data, run="run") as session:
        found = session.evaluate(data)
        predicted = session.predict(data, lambda model, batch: model(batch[0]))
        model = session.module
        assert model.training
    whole = model(EXAMPLE[:5])
    assert found.samples == 5
    assert found.loss == pytest.approx(float(whole.pow(2).mean()))
    assert list(found.metrics) == ["largest"]
    assert torch.allclose(torch.cat([part for batch in predicted for part in batch]), whole)


def test_each_step_is_recorded_and_given_to_the_callback():
    seen = []
    data = DataLoader(TensorDataset(EXAMPLE), batch_size=8)
    asked = job(loss=lambda model, batch: loss(model, batch[0]))
    with shardwise.parallelize(asked, data=data, run="run", on_step=lambda report: seen.append(report.step)) as session:
        for _ in session.steps(3):
            pass
    assert seen == [1, 2, 3]
    with open("run/metrics.jsonl") as records:
        assert len(records.readlines()) == 3


PEAK = "import torch; from shardwise.session.session import _peak_memory; print(_peak_memory(torch.device('cpu')))"


def test_the_memory_of_a_process_is_not_that_of_the_one_that_started_it():
    """What getrusage gives goes over to child processes, whatever they use themselves."""
    large = torch.ones(2**30 // 4)
    found = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert 2**26 < int(found.stdout) < large.nbytes
