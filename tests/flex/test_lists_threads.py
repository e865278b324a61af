"""Block lists that say less, or more, than ``mask_mod``, uncompiled: they hold as they do in
compiled kernels. Against float64, ranks as threads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import cp_dispatch
from cp_dispatch import ContextParallelError, HeadTail, PerDocumentHeadTail
from cp_dispatch.flex.cut import FULL, PARTIAL, Blocks, listed, lists
from tests.distributed.sharded import distribute
from tests.distributed.threads import run_threads
from tests.flex.problems import NAMES, causal
from tests.flex.sharded import in_groups, permuted, uncompiled_op

B, H, HKV, D, DV = 2, 4, 2, 8, 6


@dataclass
class Lists:
    """How blocks are listed ``(1 or B, 1 or H, R, C)``, 0 if not listed, and the mod that applies
    in them."""

    kinds: Tensor
    length: int
    block: tuple[int, int] = (8, 8)
    mod: object = None

    def mask(self) -> BlockMask:
        full = lists(self.kinds == FULL) if (self.kinds == FULL).any() else (None, None)
        return BlockMask.from_kv_blocks(
            *lists(self.kinds == PARTIAL), *full, BLOCK_SIZE=self.block, mask_mod=self.mod,
            seq_lengths=(self.length, self.length),
        )  # fmt: skip

    def pairs(self) -> Tensor:
        """``(1 or B, 1 or H, S, S)``: the pairs that kernels compute if they follow the blocks."""
        q_block, kv_block = self.block
        kinds = self.kinds.repeat_interleave(q_block, 2).repeat_interleave(kv_block, 3)
        kinds = kinds[:, :, : self.length, : self.length]
        place = torch.arange(self.length)
        said = True
        if self.mod is not None:
            said = self.mod(None, None, place[:, None], place)
        return (kinds == FULL) | ((kinds == PARTIAL) & said)


def never(b, h, q, k):
    return q < 0


def make(kind: str, length: int, block: tuple[int, int] = (8, 8)) -> Lists:
    rows, columns = (-(-length // n) for n in block)
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    drawn = torch.randint(0, 3, (B, H, rows, columns), generator=torch.Generator().manual_seed(3))
    kinds, mod = {
        "narrow": lambda: ((row == column).int()[None, None], None),
        "cut by hand": lambda: (
            (((row >= column) & (row - column < 2)) * ((row > column) + PARTIAL))[None, None],
            causal,
        ),
        "full, said to be hidden": lambda: (drawn[:1, :1] * (row != 1), never),
        "by head": lambda: (drawn[:1], causal),
        "by batch row and head": lambda: (drawn, causal),
    }[kind]()
    return Lists(kinds.to(torch.int8), length, block, mod)


def tensors(length: int) -> list[Tensor]:
    """query, key, value, and the gradients of output and logsumexp."""
    generator = torch.Generator().manual_seed(length)
    shapes = (B, H, length, D), (B, HKV, length, D), (B, HKV, length, DV), (B, H, length, DV)
    shapes = *shapes, (B, H, length)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def truth(given: Lists) -> dict[str, Tensor]:
    *leaves, grad, grad_lse = tensors(given.length)
    query, key, value = (x.requires_grad_() for x in leaves)
    key, value = (x.repeat_interleave(H // HKV, 1) for x in (key, value))
    scores = (query @ key.mT / math.sqrt(D)).masked_fill(~given.pairs(), -torch.inf)
    seen = given.pairs().any(-1, keepdim=True)
    safe = torch.where(seen, scores, 0.0)
    output, lse = torch.softmax(safe, -1) * seen @ value, safe.logsumexp(-1)
    seen = seen.squeeze(-1)
    loss = (output * grad).sum() + torch.where(seen, lse * grad_lse, 0.0).sum()
    results = output, torch.where(seen, lse, -torch.inf), *torch.autograd.grad(loss, leaves)
    return dict(zip(NAMES, [x.detach() for x in results], strict=False))


def run(given: Lists, ranks, schedule="auto", layout=None, mask=None, calls=1, places=None) -> None:
    """``ranks`` is a number, or the sizes of mesh dims, which share the sequence unless ``places``
    says otherwise."""
    want = truth(given)
    shape = (ranks,) if isinstance(ranks, int) else ranks

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape)
        for _ in range(calls):
            attend(mesh)

    def attend(mesh) -> None:

        def place(x):
            x = x if layout is None else permuted(x, layout.indices)
            return distribute(x, mesh, places or [Shard(2)] * mesh.ndim)

        *leaves, grad, grad_lse = map(place, tensors(given.length))
        leaves = [x.requires_grad_() for x in leaves]
        own = given.mask() if mask is None else mask(mesh)
        with cp_dispatch.enabled(schedule=schedule, layout=layout):
            results = flex_attention(*leaves, block_mask=own, enable_gqa=True, return_lse=True)
            grads = torch.autograd.grad(results, leaves, [grad, grad_lse])
        for name, x in zip(NAMES, (*results, *grads), strict=False):
            x = x.full_tensor().detach()
            x = x if layout is None else permuted(x, layout.inverse)
            assert torch.allclose(x, want[name], rtol=1e-9, atol=1e-9), name

    run_threads(math.prod(shape), body)


@pytest.fixture(autouse=True)
def uncompiled():
    with uncompiled_op():
        yield


KINDS = ("narrow", "cut by hand", "full, said to be hidden", "by head", "by batch row and head")


@pytest.mark.parametrize("schedule", ["auto", "gather", "ring"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length, ranks", [(64, 4), (50, 3), (52, 2), (40, 1)])
def test_lists_hold(length, ranks, kind, schedule):
    """Also if shards do not begin at a block, and the last block is not whole."""
    run(make(kind, length), ranks, schedule)


@pytest.mark.parametrize("block", [(4, 16), (16, 4), (1, 1), (128, 128)])
@pytest.mark.parametrize("schedule", ["auto", "ring"])
def test_any_block_size(block, schedule):
    run(make("by batch row and head", 50, block), 3, schedule)


@pytest.mark.parametrize("kind", ["narrow", "by batch row and head"])
@pytest.mark.parametrize("schedule", ["auto", "gather"])
def test_ranks_without_batch_rows(kind, schedule):
    """In a layout of each batch row, which gives such ranks no rows either."""
    layout, places = PerDocumentHeadTail([[7, 43], [30, 20]], 2), [Shard(0), Shard(2)]
    run(make(kind, 50), (B + 1, 2), schedule, layout, places=places)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["auto", "gather", "ring"])
def test_in_a_layout(kind, schedule):
    run(make(kind, 54), 3, schedule, HeadTail(54, 3))


@pytest.mark.parametrize("kind", ["narrow", "by batch row and head"])
def test_in_a_layout_of_each_batch_row(kind):
    run(make(kind, 50), 2, layout=PerDocumentHeadTail([[7, 43], [30, 20]], 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [None, HeadTail(50, 2)])
def test_groups_of_heads(kind, layout):
    with in_groups() as counts:
        run(make(kind, 50), 2, layout=layout)
    assert set(counts) == {("forward", 2), ("backward", 2)}


@pytest.mark.parametrize("schedule", ["auto", "ring"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [None, HeadTail(64, 2)])
def test_own_rows_only(kind, layout, schedule):
    """A rank's rows of lists, if shards begin at a block."""
    given = make(kind, 64)

    def own(mesh):
        return cp_dispatch.shard(mesh, {"mask": given.mask()}, {"mask": 2}, layout)["mask"]

    run(given, 2, schedule, layout, own)


@pytest.mark.parametrize("placements", [(Shard(1), Shard(2)), (Shard(0), Shard(2))])
def test_on_two_mesh_dims(placements):
    """Lists cover all batch rows and heads."""
    given = make("by batch row and head", 50)
    want = truth(given)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        *inputs, _, _ = (distribute(x, mesh, placements) for x in tensors(50))
        with torch.no_grad(), cp_dispatch.enabled():
            out = flex_attention(*inputs, block_mask=given.mask(), enable_gqa=True)
        torch.testing.assert_close(out.full_tensor(), want["output"], rtol=1e-9, atol=1e-9)

    run_threads(4, body)


@pytest.mark.parametrize("length, layout", [(50, None), (48, HeadTail(48, 4))])
@pytest.mark.parametrize("schedule", ["auto", "gather", "ring"])
def test_two_mesh_dims_share_the_sequence(schedule, length, layout):
    """Their ranks create a group together, while each works out its own call."""
    run(make("by head", length), (2, 2), schedule, layout, calls=3)


def test_groups_of_heads_on_two_mesh_dims():
    with in_groups():
        run(make("by head", 50), (2, 2), calls=2)


def test_debug_mode_and_own_rows(monkeypatch):
    """Ranks may have different numbers of block rows. A mask that is wrong for some ranks raises on
    all."""
    monkeypatch.setenv("CP_DISPATCH_DEBUG", "1")
    whole = create_block_mask(causal, None, None, 20, 20, "cpu", BLOCK_SIZE=6)
    first = whole[:, :, :1]
    first.seq_lengths = whole.seq_lengths  # otherwise torch 2.14 refuses it
    first.mask_mod = causal
    want = flex_attention(*tensors(20)[:3], block_mask=whole, enable_gqa=True)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        inputs = [distribute(x, mesh, [Shard(2)]) for x in tensors(20)[:3]]
        own = cp_dispatch.shard(mesh, whole, 2)  # 7, 7 and 6 rows: 2, 2 and 1 blocks
        with cp_dispatch.enabled():
            out = flex_attention(*inputs, block_mask=own, enable_gqa=True)
            torch.testing.assert_close(out.full_tensor(), want)
            with pytest.raises(ContextParallelError, match="neither this rank's nor"):
                flex_attention(*inputs, block_mask=first, enable_gqa=True)

    run_threads(3, body)


def test_table():
    """Blocks that do not exist do not count as blocks; full blocks stay full."""
    kinds = make("by head", 50).kinds
    own = Blocks(*lists(kinds == PARTIAL), *lists(kinds == FULL))
    assert torch.equal(listed(own, kinds.size(3)), kinds)
    assert torch.equal(listed(own, 4), kinds[..., :4])
    assert torch.equal(listed(own._replace(full_kv_num=None), 7), kinds * (kinds == PARTIAL))
