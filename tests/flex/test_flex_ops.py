"""The custom ops of FlexAttention: their schemas and fakes agree with the kernels."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

from cp_dispatch import HeadTail, PerDocumentHeadTail
from cp_dispatch.by_need.kept import Kept
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.flex import mask_job
from cp_dispatch.flex.bring_and_cut import SCHEMA as BRING_AND_CUT
from cp_dispatch.flex.group_ops import SCHEMAS as GROUP_SCHEMAS
from cp_dispatch.flex.mask_job import MaskJob
from cp_dispatch.flex.mask_tuple import MaskTuple
from cp_dispatch.flex.ops import SCHEMAS
from cp_dispatch.flex.own_rows import note_order
from cp_dispatch.groups import ring_group_name
from cp_dispatch.layouts import from_text
from tests.distributed.threads import run_threads

OPS = torch.ops.cp_dispatch
CHECKS = ("test_schema", "test_faketensor")


def arguments(length: int, full: bool, layout="", rank=0, ranks=1, batch=2):
    mask = create_block_mask(
        lambda b, h, q, k: q >= k, None, None, length, length, "cpu", BLOCK_SIZE=8
    )
    tensors = list(MaskTuple(mask.as_tuple()).tensors)
    if not full:
        tensors[2:] = [None, None]
    shape = [ranks] if ranks > 1 else []
    return (*tensors, length, length, [8, 8], [0, batch, 0, 3], shape, rank, "", layout, False,
            False)  # fmt: skip


def keys(length: int):
    key, value = torch.randn(2, 3, length, 4), torch.randn(2, 3, length, 5)
    # In the memory layout of models, and in that of a matmul's result.
    return key.transpose(1, 2).contiguous().transpose(1, 2), value


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", ["", HeadTail(37, 2).text,
                                    PerDocumentHeadTail([[7, 30], [30, 7]], 2).text])  # fmt: skip
def test_cut(layout, rank, full):
    own = arguments(37, full, layout, rank, 2)
    for hop in (-1,) if "Document" in layout else (-1, 0, 1):
        torch.library.opcheck(OPS.flex_cut.default, (*own, hop, False), test_utils=CHECKS)
    if layout:
        torch.library.opcheck(OPS.flex_cut.default, (*own, -1, True), test_utils=CHECKS)
        lists, both = OPS.flex_cut(*own, -1, False), OPS.flex_cut(*own, -1, True)
        rows = from_text(layout).shard_lengths[rank]
        order = OPS.flex_order(torch.ones(1), layout, rank, [0, 2, 0, 1], rows)
        assert torch.equal(both, torch.cat([lists, order.flatten()]))


@pytest.mark.parametrize("full", [True, False])
def test_listed(full):
    torch.library.opcheck(OPS.flex_listed.default, (*arguments(37, full)[:4], 5), test_utils=CHECKS)


@pytest.mark.parametrize("length", [16, 21])
def test_bring(length):
    mask, (key, value) = arguments(length, True), keys(length)
    torch.library.opcheck(
        OPS.flex_bring.default, (key, value, *mask, True, False), test_utils=CHECKS
    )
    grads = torch.randn_like(key), torch.randn_like(value)
    torch.library.opcheck(
        OPS.flex_bring_back.default, (*grads, key, value, *mask), test_utils=CHECKS
    )
    for got, want in zip(OPS.flex_bring_back(*grads, key, value, *mask), grads, strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


def test_rows_in_another_order_are_refused_where_all_keys_move():
    """Also by the op that looks at what is known about a mask, after a mask in the right order."""

    def body(rank: int) -> None:
        name = ring_group_name(init_device_mesh("cpu", (2,)), (0,))
        rest = 32, 32, [8, 8], [0, 2, 0, 3], [2], rank, name, HeadTail(32, 2).text, True, True

        def own_rows() -> list:
            rows = create_block_mask(
                lambda b, h, q, k: q >= 0, None, None, 16, 32, "cpu", BLOCK_SIZE=8
            )
            return list(MaskTuple(rows.as_tuple()).tensors)

        right, wrong = own_rows(), own_rows()
        note_order(right[0], MaskJob(*right, *rest).queries)
        note_order(wrong[0], MaskJob(*wrong, *rest[:7], "", True, True).queries)
        key, value = keys(16)
        for bring in (
            lambda mask: OPS.flex_bring(key, value, *mask, *rest, False, False),
            lambda mask: OPS.flex_bring_and_cut(key, value, *mask, *rest, False, False),
        ):
            bring(right)
            with pytest.raises(ContextParallelError, match="one rank's rows of natural order"):
                bring(wrong)

    run_threads(2, body)


@pytest.mark.parametrize("layout", ["", HeadTail(37, 2).text])
def test_bring_and_cut(layout):
    """The results of both ops; where the mask is known, its rows are not copied."""
    own = arguments(16, True)
    torch.library.opcheck(
        OPS.flex_bring_and_cut.default, (*keys(16), *own, True, False), test_utils=CHECKS
    )

    def body(rank: int) -> None:
        mask = list(arguments(37, True, layout, rank, 2))
        mask[10] = ring_group_name(init_device_mesh("cpu", (2,)), (0,))
        tensors = keys(MaskJob(*mask).keys.rows(rank))
        with torch.inference_mode():  # leaves nothing that a backward could not use
            OPS.flex_bring_and_cut(*tensors, *mask, True, bool(layout))
        brought, lists = OPS.flex_bring_and_cut(*tensors, *mask, True, bool(layout))
        assert torch.equal(brought, OPS.flex_bring(*tensors, *mask, True, False))
        want = OPS.flex_cut(*mask, -1, bool(layout))
        assert torch.equal(lists, want) and want.data_ptr() != lists.data_ptr()
        assert not lists.is_inference()
        again = OPS.flex_bring_and_cut(*tensors, *mask, True, bool(layout))[1]
        assert again.data_ptr() == lists.data_ptr()
        mask[0].zero_()  # all partial blocks go
        assert not torch.equal(OPS.flex_bring_and_cut(*tensors, *mask, True, False)[1], want)

    run_threads(2, body)


def test_a_mask_takes_one_place_of_what_is_kept(monkeypatch):
    """Whatever its ops find out."""
    known = Kept()
    monkeypatch.setattr(mask_job, "kept", known)
    mask, tensors = arguments(16, True), keys(16)
    OPS.flex_cut(*mask, -1, False)
    OPS.flex_bring(*tensors, *mask, True, False)
    OPS.flex_bring_and_cut(*tensors, *mask, True, False)
    OPS.flex_bring_back(*tensors, *tensors, *mask)
    assert len(known._entries) == 1


def test_order_and_apart():
    for which, part in ((0, [0, 2]), (1, [1, 1]), (-1, [0, 2]), (-2, [0, 2])):
        layout = PerDocumentHeadTail([[7, 30], [30, 7]], 2)
        rows = 37 if which < 0 else layout.shard_lengths[which]
        torch.library.opcheck(
            OPS.flex_order.default,
            (torch.ones(1), layout.text, which, [*part, 0, 1], rows),
            test_utils=CHECKS,
        )
    torch.library.opcheck(
        OPS.flex_apart.default, ([torch.ones(3), torch.ones(2, 2)],), test_utils=CHECKS
    )


@pytest.mark.parametrize("layout", ["", PerDocumentHeadTail([[7, 30], [30, 7]], 2).text])
def test_fakes_of_groups(layout):
    """The fakes have the shapes that two ranks get."""

    def calls(key, value, mask):
        token = OPS.flex_start(key, value, *mask, 3, True, False)
        arrived = OPS.flex_arrive(token, None, key, value, *mask, 3, 1, True)
        given = None
        for group in range(3):
            part = (x[:, group : group + 1].repeat(1, 1, 3, 1)[:, :, :37] for x in (key, value))
            given = OPS.flex_give(given, *part, key, value, *mask, 3, group)
        return token, arrived, given, *OPS.flex_collect(given, key, value, *mask, 3)

    def looks(results):
        return [(x.shape, x.stride(), x.dtype, x.device) for x in results]

    masks = [arguments(37, True, layout, rank, 2) for rank in range(2)]
    lengths = [MaskJob(*mask).keys.rows(rank) for rank, mask in enumerate(masks)]
    tensors = [keys(length) for length in lengths]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [
            looks(calls(*map(mode.from_tensor, tensors[rank]), masks[rank])) for rank in range(2)
        ]

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        mask = list(masks[rank])
        mask[-4] = ring_group_name(mesh, (0,))
        assert looks(calls(*tensors[rank], mask)) == fakes[rank]

    run_threads(2, body)


def test_every_op_waits_for_the_host_and_says_so():
    for schema in (*SCHEMAS, *GROUP_SCHEMAS, BRING_AND_CUT):
        op = getattr(OPS, schema.split("(")[0]).default
        assert torch.Tag.cudagraph_unsafe in op.tags
