"""Samples in order: micro-batches are made of samples, whoever loads them.

    feed = Feed(loader, batch_size=512, share=plan_share, data_rank=1, loads=True, seed=0)
    step = next(feed)                     # this data rank's micro-batches of the next step; on and on, over epochs
    state = feed.state()                  # what was consumed, as JSON; never what was only prefetched
    feed.restore(state)                   # the very next sample, also with other data ranks, micro-batches or workers

**Order.** All ranks must see the same order, so each rank iterates the whole sampler and loads only its own samples.
What a sampler draws from Python's, numpy's or torch's global generators is seeded from (seed, epoch); its own
`torch.Generator` attributes (and the loader's) advance as on one device and are part of the state; `set_epoch` is
called before each epoch. A sampler that draws from anything else (time, another generator, the rank) may differ:
`Feed.order_fingerprint` after equal steps tells ranks apart, and restoring refuses an order that is not the saved one.

**Random augmentations.** Python's, numpy's and torch's global generators are seeded from (seed, epoch, place of the
sample in the epoch) before each sample, so what a dataset draws from them depends on no rank, worker or resumption,
and the main process's own draws are not disturbed. Before each collation they are seeded from the place of its first
sample, so what a collate function draws depends on the micro-batches, as does what a dataset draws that fetches many
at once (`__getitems__`). Generators that the dataset holds itself are its own affair. The seeding takes about 13 us a
sample, in the workers where there are some.

**Streams.** An `IterableDataset` is read from its start by every rank, also those that load nothing (only its end
tells how large the last batch is), and resuming reads it again up to the sample. It must give the same samples on
every rank: let it not divide itself by rank.
"""

from shardwise.data.feed import Feed, FeedStep, epoch_of
from shardwise.data.part import ShareOut
from shardwise.data.slicing import samples_in, slice_batch
from shardwise.data.source import Data, example

__all__ = ["Data", "Feed", "FeedStep", "ShareOut", "epoch_of", "example", "samples_in", "slice_batch"]
