"""The flat layout: pure arithmetic."""

import pytest
import torch

from minidist.parallel.flat import SHARD_ALIGN, FlatLayout

SHAPES = [(7,), (), (3, 5), (0, 4), (10,), (1,)]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_shards_cover_the_buffer_and_pieces_cover_the_tensors(world):
    layout = FlatLayout(SHAPES, world)
    assert layout.numel == 7 + 1 + 15 + 0 + 10 + 1
    assert layout.shard_numel * world == layout.padded_numel
    assert world == 1 or layout.shard_numel % SHARD_ALIGN == 0
    flat = layout.buffer(torch.float64)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    layout.pack(tensors, flat)
    rebuilt = [torch.full_like(t, float("nan")).flatten() for t in tensors]
    for rank in range(world):
        shard = layout.shard(flat, rank)
        for index, start, stop, at in layout.pieces(rank):
            rebuilt[index][start:stop] = shard[at : at + stop - start]
    for tensor, view, again in zip(tensors, layout.views(flat), rebuilt, strict=True):
        assert torch.equal(tensor, view) and torch.equal(tensor, again.view_as(tensor))
    assert (flat[layout.numel :] == 0).all()


def test_strided_tensors_keep_their_values():
    transposed = torch.arange(15.0).view(3, 5).t()
    column = torch.arange(12.0).view(4, 3)[:, 0]
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    layout = FlatLayout([transposed, column, image], 2)
    views = layout.views(layout.pack([transposed, column, image], layout.buffer(torch.float32)))
    for tensor, view in zip([transposed, column, image], views, strict=True):
        assert torch.equal(tensor, view)


def test_debug_poisons_padding(monkeypatch):
    monkeypatch.setenv("MINIDIST_DEBUG", "1")
    layout = FlatLayout([(5,)], 2)
    flat = layout.pack([torch.ones(5)], layout.buffer(torch.float32))
    assert flat[:5].eq(1).all() and flat[5:].isnan().all() and flat[5:].numel()


def test_one_rank_has_no_padding():
    assert FlatLayout([(5,), (2,)], 1).padded_numel == 7


def test_world_size_is_checked():
    with pytest.raises(ValueError, match="world_size"):
        FlatLayout([(5,)], 0)
