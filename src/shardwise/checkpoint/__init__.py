"""What survives: the state of a run on disk, whole or not at all.

    run/checkpoints/
        step-00000040/            published: every file is in its SHA256SUMS (`sha256sum -c` checks it by hand)
        step-00000042/
        .saving-step-.../         a save that did not end; the next save removes it
        abandoned-step-.../       later than a step saved since: the run went back. Yours to delete

Tensors lie under one-device names ("model/h.0.attn.weight", "optimizer/h.0.attn.weight/exp_avg") in the format of
torch.distributed.checkpoint, so any plan on any number of ranks can read what any other wrote. The folder must be one
that all ranks share.

    save(folder, step, state, meta)
    checkpoint = open_latest(folder)                      # checks every byte; goes one back from a damaged one
    state = model_tensors | optimizer_skeleton(optimizer, names, checkpoint.entries)
    meta = load(checkpoint, state)
    restore_optimizer(optimizer, names, state)

The index of a checkpoint is a pickle, as torch writes it: open only checkpoints that you trust.
"""

from shardwise.checkpoint.folder import latest
from shardwise.checkpoint.loading import Checkpoint, load, load_part, open_checkpoint, open_latest
from shardwise.checkpoint.optimizer_state import flatten_optimizer, optimizer_skeleton, restore_optimizer
from shardwise.checkpoint.saving import save
from shardwise.checkpoint.tensors import Entry

__all__ = [
    "Checkpoint",
    "Entry",
    "flatten_optimizer",
    "latest",
    "load",
    "load_part",
    "open_checkpoint",
    "open_latest",
    "optimizer_skeleton",
    "restore_optimizer",
    "save",
]
