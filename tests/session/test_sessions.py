"""Several sessions in one program, one after the other, on two ranks."""

import json
from textwrap import dedent

from shardwise.launch import start_script

ONE_AFTER_THE_OTHER = """
    import json, os, time
    from pathlib import Path
    import torch
    from torch import nn
    import shardwise

    rank = int(os.environ["RANK"])
    job = shardwise.Job(
        model=lambda: nn.Linear(4, 1),
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        batch_size=8,
    )
    batch = torch.ones(8, 4)
    sessions, losses = [], []
    for number in range(3):
        with shardwise.parallelize(job, run=f"run-{number}") as session:
            losses.append(session.step(batch).loss)
        sessions.append(session)
        time.sleep(0.5 * (rank == number % 2))
    Path(f"losses-{rank}").write_text(json.dumps(losses))
"""


def test_ranks_that_come_late_to_the_next_session_find_each_other(tmp_path, monkeypatch):
    """The second session waited for the addresses of the first for ever, where one rank was ahead of the other."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(dedent(ONE_AFTER_THE_OTHER))

    outcome = start_script(script, devices=2, run_folder=tmp_path / "run")

    assert outcome.exit_code == 0
    losses = [json.loads((tmp_path / f"losses-{rank}").read_text()) for rank in range(2)]
    assert losses[0] == losses[1] == [losses[0][0]] * 3
