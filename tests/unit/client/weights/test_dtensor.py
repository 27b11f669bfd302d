"""The ranks' shares of a tensor: together every byte once. Ranks are played one after the other, without a network."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from genserve.client.weights.modules import MAX_PIECES, block_ranges
from genserve.client.weights.sources import num_ranks, tensor_sources

Play = Callable[[int, tuple[int, ...]], DeviceMesh]


@pytest.fixture
def play() -> Iterator[Play]:
    """Makes this process a rank of a mesh."""

    def begin(rank: int, shape: tuple[int, ...]) -> DeviceMesh:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=torch.Size(shape).numel())
        return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


def assembled(size_bytes: int, of_rank: Callable[[int], object], num_ranks: int) -> bytes:
    """What arrives when every rank sends its share of the tensor "w"; no byte comes twice, none is missing."""
    found: dict[int, int] = {}
    for rank in range(num_ranks):
        (source,) = tensor_sources({"w": of_rank(rank)})
        data, position = bytes(source.read()), 0
        for start, end in source.ranges:
            assert not found.keys() & set(range(start, end)), "sent twice"
            found |= dict(zip(range(start, end), data[position : position + end - start], strict=True))
            position += end - start
        assert source.ranges == () or position == len(data)
    return bytes(found[i] for i in range(size_bytes))


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (4,), (2, 2), (3, 2)])
def test_shares_make_the_whole(play: Play, mesh_shape: tuple[int, ...]) -> None:
    """Of any shape, sharded by any dimensions of the mesh, replicated over the others."""
    rng = random.Random(0)
    for _ in range(25):
        shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 3)))
        whole = torch.randn(shape).to(rng.choice([torch.bfloat16, torch.float32]))
        choices: list[Placement] = [Replicate(), *map(Shard, range(len(shape)))]
        placements = [rng.choice(choices) for _ in mesh_shape]

        def of_rank(rank: int, whole: torch.Tensor = whole, placements: list[Placement] = placements) -> object:
            return distribute_tensor(whole, play(rank, mesh_shape), placements, src_data_rank=None)

        data = whole.view(torch.uint8).numpy().tobytes()
        assert assembled(len(data), of_rank, torch.Size(mesh_shape).numel()) == data, (shape, placements)


def test_fsdp_over_tensor_parallel(play: Play) -> None:
    """Rows that were shared out by tensor parallelism first, as fully_shard has them then. It keeps the mesh of the
    first rank that a process plays, so the tensor is made here."""
    whole = torch.arange(24.0).reshape(8, 3)

    def of_rank(rank: int) -> object:
        dp, tp = divmod(rank, 2)
        start, placements = 4 * tp + 2 * dp, [_StridedShard(0, split_factor=2), Shard(0)]
        return DTensor.from_local(
            whole[start : start + 2], play(rank, (2, 2)), placements, shape=whole.shape, stride=whole.stride()
        )

    data = whole.numpy().tobytes()
    assert assembled(len(data), of_rank, 4) == data


def test_tied_tensors_are_one_on_every_rank(play: Play) -> None:
    """Also on one that has no row of them; and tensors that are not tied are not."""
    for rank in range(4):
        mesh = play(rank, (4,))
        one, other = (distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)], src_data_rank=None) for _ in range(2))
        sources = tensor_sources({"embed": one, "head": one.detach(), "other": other, "buffer": torch.ones(2)})
        assert [source.name for source in sources] == ["embed", "other", "buffer"]
        assert [source.shape for source in sources] == [(3, 2), (3, 2), (2,)]
        assert sources[2].ranges == (((0, 8),) if rank == 0 else ())
        assert num_ranks(sources) == 4


def test_plain_tensors_beside_dtensors_are_sent_by_the_first_rank(play: Play) -> None:
    """All of them have the same."""
    for rank in range(2):
        sharded = distribute_tensor(torch.ones(4), play(rank, (2,)), [Shard(0)], src_data_rank=None)
        sources = tensor_sources({"first": torch.ones(2), "sharded": sharded, "last": torch.zeros(3)})
        expected = [((0, 8),), ((8 * rank, 8 * rank + 8),), ((0, 12),)] if rank == 0 else [(), ((8, 16),), ()]
        assert [source.ranges for source in sources] == expected
        assert [source.share is not None and source.share.rank for source in sources] == [rank] * 3


def test_meshes_of_other_ranks_leave_the_number_of_callers_open(play: Play) -> None:
    """Only the trainer knows it then."""
    mesh = play(0, (2, 2))
    tensors = {
        name: distribute_tensor(torch.ones(4), mesh[name], [Shard(0)], src_data_rank=None) for name in ("dp", "tp")
    }
    with pytest.raises(ValueError, match="callers"):
        num_ranks(tensor_sources(tensors))


def test_pieces_of_all_tensors_count(play: Play) -> None:
    """Each of them has few enough."""
    mesh = play(0, (2,))
    half = MAX_PIECES // 2 + 2
    tensors = {
        name: distribute_tensor(torch.ones(half, 2), mesh, [Shard(1)], src_data_rank=None) for name in ("one", "two")
    }
    assert len(tensor_sources({"one": tensors["one"]})[0].ranges) == half
    with pytest.raises(ValueError, match=rf"\bone\b.* {half} "):
        tensor_sources(tensors)


def test_as_many_pieces_as_a_rank_may_send_are_sent(play: Play) -> None:
    """Beside the one that any tensor has."""
    mesh = play(0, (2,))
    for num_pieces in (MAX_PIECES + 1, MAX_PIECES + 2):
        tensor = distribute_tensor(torch.ones(num_pieces, 2), mesh, [Shard(1)], src_data_rank=None)
        if num_pieces == MAX_PIECES + 1:
            assert len(tensor_sources({"w": tensor})[0].ranges) == num_pieces
        else:
            with pytest.raises(ValueError, match=f"{MAX_PIECES}; redistribute it"):
                tensor_sources({"w": tensor})


def test_pending_sums_are_refused(play: Play) -> None:
    """By the tensor's name: adding them up would be a collective operation."""
    pending = DTensor.from_local(torch.ones(4), play(0, (2,)), [Partial()])
    with pytest.raises(ValueError, match=r"^w: .*pending"):
        tensor_sources({"w": pending})


def test_what_is_no_block_is_refused(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a placement that leaves two chunks, or one of another shape, on a rank."""
    tensor = distribute_tensor(torch.ones(4), play(0, (2,)), [Shard(0)], src_data_rank=None)
    (chunk,) = tensor.__create_chunk_list__()
    for chunks in ([chunk, chunk], [replace(chunk, sizes=torch.Size([1]))]):
        monkeypatch.setattr(DTensor, "__create_chunk_list__", lambda _, chunks=chunks: chunks)
        with pytest.raises(ValueError, match=r"^w: "):
            tensor_sources({"w": tensor})


def test_a_block_is_as_few_ranges_as_can_be() -> None:
    """Each as long as what lies side by side."""
    assert list(block_ranges((), (), (), 4)) == [(0, 4)]
    assert list(block_ranges((6, 4), (2, 0), (3, 4), 2)) == [(16, 40)]
    assert list(block_ranges((2, 6, 4), (0, 3, 0), (2, 3, 4), 1)) == [(12, 24), (36, 48)]
    shape, offsets, sizes = (3, 4, 5), (1, 1, 2), (2, 3, 2)
    inside = [index for index in itertools.product(*map(range, shape))]
    flat = [
        i
        for i, index in enumerate(inside)
        if all(o <= x < o + s for x, o, s in zip(index, offsets, sizes, strict=True))
    ]
    assert [i for start, end in block_ranges(shape, offsets, sizes, 1) for i in range(start, end)] == flat
