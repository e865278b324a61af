"""Sharding whole tensors and getting them back, with ranks as threads."""

from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask

import cp_dispatch
from cp_dispatch import BlockBalanced, ContextParallelError, HeadTail, PerDocumentHeadTail
from tests.distributed.threads import run_threads
from tests.ranks import fake_ranks, one_rank

ROWS = [[5, 11, 8], [1, 22, 1]]


def balancers(world_size: int):
    yield None
    yield HeadTail(24, world_size)
    yield PerDocumentHeadTail([7, 9, 8], world_size)
    yield PerDocumentHeadTail(ROWS, world_size)
    if 12 % world_size == 0:
        yield BlockBalanced([range(12), [3.5] * 11 + [0]], world_size, block_size=2)


def tensors() -> dict:
    """Two batch rows, 24 positions, every kind of tensor and every sequence dim."""
    return {
        "tokens": torch.randint(1000, (2, 24)),
        "mask": torch.rand(2, 24) > 0.5,
        "query": torch.randn(2, 3, 24, 4),
        "token_major": torch.randn(2, 24, 3, 4, dtype=torch.bfloat16),
        "strided": torch.randn(2, 4, 24, 3).transpose(1, 3),
        "expanded": torch.randn(1, 24, 5).expand(2, 24, 5),
        "complex": torch.randn(2, 1, 1, 24, dtype=torch.complex64),
        "short": torch.randint(99, (2, 24), dtype=torch.int16),
        "unsigned": torch.randint(99, (2, 24)).to(torch.uint16),
        "conjugate": torch.randn(2, 24, dtype=torch.complex128).conj(),
        "negative": torch.randn(2, 24, dtype=torch.complex64).conj().imag,
        "eight_bits": torch.randn(2, 24).to(torch.float8_e4m3fn),
        "empty": torch.randn(2, 24, 0),
    }


DIMS = {
    name: {"query": 2, "strided": 2, "complex": -1, "mask": -1}.get(name, 1) for name in tensors()
}


def on_ranks(world_size: int, function) -> list:
    def body(rank):
        return function(rank, init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",)))

    return run_threads(world_size, body)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, which ``torch.equal`` compares for any dtype, including NaN and -0."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.view(torch.uint8) if plain.numel() else plain


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in a dtype that torch can index."""
    return tensor if tensor.is_complex() else tensor.double()


def expected(tensor, dim: int, balancer, world_size: int, rank: int) -> torch.Tensor:
    """The result that ``shard`` promises, row by row."""
    tensor = wide(tensor)
    if balancer is None:
        return tensor.chunk(world_size, dim)[rank]
    index = balancer.positions(rank)
    rows = [
        row.index_select(dim % tensor.ndim - 1, index[i % balancer.rows])
        for i, row in enumerate(tensor)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_round_trip(world_size):
    whole = tensors()

    def body(rank, mesh):
        for balancer in balancers(world_size):
            local = cp_dispatch.shard(mesh, whole, DIMS, balancer)
            assert list(local) == list(whole)
            for name, x in local.items():
                want = expected(whole[name], DIMS[name], balancer, world_size, rank)
                assert x.dtype == whole[name].dtype and x.is_contiguous()
                assert x.numel() == 0 or x.data_ptr() != whole[name].data_ptr()
                assert torch.equal(wide(x), want), (balancer, name)
            back = cp_dispatch.unshard(mesh, local, DIMS, balancer)
            for name, x in back.items():
                assert x.dtype == whole[name].dtype and x.is_contiguous()
                assert torch.equal(bits(x), bits(whole[name])), (balancer, name)

    on_ranks(world_size, body)


@pytest.mark.parametrize("length", [1, 3, 5, 10, 13])
def test_uneven(length):
    """Short and empty last shards, in every sequence dim."""
    whole = [torch.randn(length, 2), torch.randn(2, length), torch.randn(2, 3, length)]

    def body(rank, mesh):
        for balancer in None, HeadTail(length, 4):
            local = cp_dispatch.shard(mesh, whole, [0, 1, 2], balancer)
            rows = HeadTail(length, 4).shard_lengths[rank]
            assert [x.shape[dim] for dim, x in enumerate(local)] == [rows] * 3
            back = cp_dispatch.unshard(mesh, local, [0, 1, 2], balancer)
            assert all(torch.equal(*pair) for pair in zip(back, whole, strict=True))

    on_ranks(4, body)


@pytest.mark.parametrize("balancer", [None, HeadTail(16, 2)], ids=str)
def test_block_masks_come_back_whole(balancer):
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 16, 16, device="cpu", BLOCK_SIZE=4)
    whole = {"mask": mask, "x": torch.randn(16)}

    def body(rank, mesh):
        local = cp_dispatch.shard(mesh, whole, 0, balancer)
        assert local["mask"].kv_num_blocks.shape[2] == 2 and local["x"].shape == (8,)
        back = cp_dispatch.unshard(mesh, local, 0, balancer)
        assert back["mask"] is mask and torch.equal(back["x"], whole["x"])

    on_ranks(2, body)


def test_natural_order_is_dtensors():
    whole = torch.randn(2, 10, 3)

    def body(rank, mesh):
        local = cp_dispatch.shard(mesh, whole, 1)
        assert torch.equal(local, distribute_tensor(whole, mesh, [Shard(1)]).to_local())

    on_ranks(4, body)


class Pair(NamedTuple):
    tokens: torch.Tensor
    more: dict


def test_structures():
    pair = Pair(torch.arange(8), {"x": None})
    whole = (torch.arange(8), [torch.arange(16).view(2, 8), None], pair)

    def body(rank, mesh):
        local = cp_dispatch.shard(mesh, whole, -1)
        assert isinstance(local, tuple) and isinstance(local[1], list)
        assert isinstance(local[2], Pair) and local[2].more == {"x": None} and local[1][1] is None
        assert local[0].tolist() == list(range(4 * rank, 4 * rank + 4))
        again = cp_dispatch.shard(mesh, whole, (0, [1, 0], (0, 0)))
        assert torch.equal(local[1][0], again[1][0])
        back = cp_dispatch.unshard(mesh, local, -1)
        assert torch.equal(back[1][0], whole[1][0]) and torch.equal(back[2].tokens, whole[0])
        assert cp_dispatch.unshard(mesh, [], 0) == []

    on_ranks(2, body)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients(world_size):
    """shard's gradients add up to the whole gradient. unshard's is the slice of the replicated
    one."""
    whole, weight = torch.randn(2, 24, 3).double(), torch.randn(2, 24, 3).double()

    def body(rank, mesh):
        for balancer in balancers(world_size):
            x = whole.clone().requires_grad_()
            local = cp_dispatch.shard(mesh, x, 1, balancer)
            # A part of the loss on each rank.
            (partial,) = torch.autograd.grad((local * local).sum(), x)
            own = cp_dispatch.shard(mesh, whole, 1, balancer)
            assert partial.count_nonzero() == own.numel()
            torch.distributed.all_reduce(partial)
            assert torch.equal(partial, 2 * whole)
            # The same loss on every rank.
            leaf = local.detach().requires_grad_()
            back = cp_dispatch.unshard(mesh, leaf, 1, balancer)
            (slice_,) = torch.autograd.grad((back * weight).sum(), leaf)
            assert torch.equal(slice_, cp_dispatch.shard(mesh, weight, 1, balancer))

    on_ranks(world_size, body)


def test_gradient_is_that_of_full_tensor():
    weight = torch.randn(10, 3)

    def body(rank, mesh):
        local = torch.randn(10, 3).chunk(4)[rank]
        ours, theirs = local.clone().requires_grad_(), local.clone().requires_grad_()
        (cp_dispatch.unshard(mesh, ours, 0) * weight).sum().backward()
        dtensor = DTensor.from_local(theirs, mesh, [Shard(0)], shape=(10, 3), stride=(3, 1))
        (dtensor.full_tensor() * weight).sum().backward()
        assert torch.equal(ours.grad, theirs.grad)

    on_ranks(4, body)


def test_gradcheck():
    per_row = PerDocumentHeadTail([[1, 5], [4, 2]], 1)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    with one_rank() as mesh:
        for function in cp_dispatch.shard, cp_dispatch.unshard:
            for balancer in None, HeadTail(6, 1), per_row:
                inputs = mesh, x, 2, balancer
                assert torch.autograd.gradcheck(function, inputs)
                assert torch.autograd.gradgradcheck(function, inputs)


def test_parameters_and_grad_modes():
    parameter = torch.nn.Parameter(torch.randn(4, 8))
    with fake_ranks(2) as mesh:
        local = cp_dispatch.shard(mesh, parameter, 1)
        assert type(local) is torch.Tensor and local.requires_grad
        with torch.no_grad():
            assert not cp_dispatch.shard(mesh, parameter, 1).requires_grad
        with torch.inference_mode():
            assert cp_dispatch.shard(mesh, parameter, 1).is_inference()


@pytest.mark.parametrize(
    ("buffers", "seq_dims", "balancer", "message"),
    [
        (torch.ones(2, 8), 1, HeadTail(8, 4), "is for 4 ranks, the mesh has 2"),
        (torch.ones(2, 8), 1, "head-tail", "balancer must be None .*got 'head-tail'"),
        (torch.ones(2, 9), 1, HeadTail(8, 2), "is for 8 positions, the tensor has 9 along dim 1"),
        (torch.ones(2, 8), 2, None, r"has shape \[2, 8\], which has no dim 2"),
        (torch.tensor(1.0), 0, None, r"has shape \[\], which has no dim 0"),
        (torch.ones(8), True, None, "must be an int, got True"),
        ([torch.ones(8)], [0, 1], None, "holds 1 tensors, but seq_dims holds 2 ints"),
        ({"a": torch.ones(8)}, {"b": 0}, None, r"has the keys \['a'\], but seq_dims has \['b'\]"),
        ({"a": torch.ones(8)}, [0], None, "must be an int or a dict of ints"),
        ({"a": [3]}, 0, None, r"buffers\['a'\]\[0\] must be a tensor, or a list, .* got int"),
        (torch.ones(3, 24), 1, PerDocumentHeadTail(ROWS, 2), r"has 2 layouts, .* shape \[3, 24\]"),
        (torch.ones(24, 2), 0, PerDocumentHeadTail(ROWS, 2), "its sequence in dim 0"),
        (torch.ones(2, 2), 0, PerDocumentHeadTail([[1, 1], [2]], 2), "its sequence in dim 0"),
    ],
)
def test_refusals(buffers, seq_dims, balancer, message):
    with fake_ranks(2) as mesh, pytest.raises(ContextParallelError, match=message):
        cp_dispatch.shard(mesh, buffers, seq_dims, balancer)


def test_refuses_other_kinds():
    with fake_ranks(2) as mesh:
        with pytest.raises(ContextParallelError, match="DTensor with placements .*full_tensor"):
            x = distribute_tensor(torch.ones(8), mesh, [Replicate()], src_data_rank=None)
            cp_dispatch.shard(mesh, x, 0)
        mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 256, 256, device="cpu")
        with pytest.raises(ContextParallelError, match="does not come from shard"):
            cp_dispatch.unshard(mesh, {"mask": mask}, 0)
        own = cp_dispatch.shard(mesh, {"mask": mask}, 0)["mask"]
        with pytest.raises(ContextParallelError, match="already hold one rank's rows"):
            cp_dispatch.shard(mesh, own, 0)
        with pytest.raises(ContextParallelError, match="must be a DeviceMesh, got NoneType"):
            cp_dispatch.shard(None, torch.ones(8), 0)
    with fake_ranks(2, 2, names=("dp", "cp")) as mesh:
        with pytest.raises(ContextParallelError, match=r"one dim, got dims .*'dp', 'cp'.*\(2, 2\)"):
            cp_dispatch.shard(mesh, torch.ones(8), 0)
        assert cp_dispatch.shard(mesh["cp"], torch.ones(8), 0).shape == (4,)


def test_unshard_refuses_odd_shards_on_every_rank():
    def body(rank, mesh):
        with pytest.raises(ContextParallelError, match=r"shards of \[3, 4\] rows .* \[4, 3\]"):
            cp_dispatch.unshard(mesh, torch.ones(3 + rank), 0)
        with pytest.raises(ContextParallelError, match="is for 10 positions, the tensor has 8"):
            cp_dispatch.unshard(mesh, torch.ones(4), 0, HeadTail(10, 2))

    on_ranks(2, body)


def test_a_rank_outside_of_the_mesh_is_refused():
    with fake_ranks(4, rank=3):
        mesh = DeviceMesh("cpu", [0, 2])
        with pytest.raises(ContextParallelError, match=r"rank 3 is not part of the mesh \[0, 2\]"):
            cp_dispatch.shard(mesh, torch.zeros(1, 8), 1)
        with pytest.raises(ContextParallelError, match=r"is not part of the mesh \[0, 2\]"):
            cp_dispatch.create_cp_block_mask(lambda *_: True, 1, 1, 256, 256, mesh)


@pytest.mark.parametrize("balancer", balancers(2), ids=repr)
def test_fake_tensors(balancer):
    """For estimates of memory, without data: indices that a balancer has made have data."""
    with fake_ranks(2) as mesh, FakeTensorMode():
        whole = torch.ones(2, 24, requires_grad=True)
        own = cp_dispatch.shard(mesh, whole, 1, balancer)
        joined = cp_dispatch.unshard(mesh, own, 1, balancer)
        joined.sum().backward()
        assert own.shape == (2, 12) and joined.shape == whole.grad.shape == (2, 24)


def test_a_block_with_fake_tensors():
    with fake_ranks(2) as mesh, FakeTensorMode():
        x = torch.ones(2, 3, 24, 4)
        with cp_dispatch.context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
            shard = x.clone().requires_grad_()
            out = torch.nn.functional.scaled_dot_product_attention(*[shard] * 3, is_causal=True)
            out.sum().backward()
            (joined,) = cp_dispatch.context_parallel_unshard(mesh, [out], [2])
        assert out.shape == shard.grad.shape == (2, 3, 12, 4)
        assert x.shape == joined.shape == (2, 3, 24, 4)


def test_own_rows_of_a_fake_block_mask():
    with fake_ranks(2) as mesh, FakeTensorMode():
        mask = cp_dispatch.create_cp_block_mask(
            lambda b, h, q, k: q >= k, None, None, 64, 64, mesh, layout=HeadTail(64, 2),
            BLOCK_SIZE=16,
        )  # fmt: skip
        assert mask.kv_indices.shape == (1, 1, 2, 4)
