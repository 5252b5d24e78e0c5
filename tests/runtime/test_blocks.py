"""What FSDP2 gathers at a time: SegFormer keeps its blocks in lists of lists, which made it shard a list."""

from torch import nn

from shardwise.runtime.program import _repeated_blocks


def test_blocks_come_inner_ones_first_and_a_list_is_none():
    rows = [nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]) for _ in range(2)]
    blocks = _repeated_blocks(nn.Sequential(nn.ModuleList(rows), nn.Linear(2, 2)))
    place = {id(block): at for at, block in enumerate(blocks)}
    assert not any(isinstance(block, nn.ModuleList) for block in blocks)
    assert len(blocks) == 2 * 2 * (1 + 2)
    assert all(place[id(inner)] < place[id(outer)] for row in rows for outer in row for inner in outer)
