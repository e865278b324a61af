"""If ranks read each other's rooms, an error of a FlexAttention op on some of them leaves no other
rank waiting, and no flag for the next call (:mod:`cp_dispatch.flex.to_the_end`).

Copy engines are emulated (:mod:`tests.distributed.rooms`).
"""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

from cp_dispatch import BlockBalanced, HeadTail, PerDocumentHeadTail
from cp_dispatch.by_need.to_the_end import finish
from cp_dispatch.flex import group_ops, ops
from cp_dispatch.flex.groups import spans
from cp_dispatch.flex.mask_job import MaskJob
from cp_dispatch.flex.to_the_end import pulls_after
from cp_dispatch.groups import ring_group_name
from tests.distributed.out_of_memory import failures
from tests.distributed.rooms import Rooms
from tests.distributed.test_errors_threads import Memory

RANKS, LENGTH, B, HKV, D, DV = 3, 96, 2, 4, 3, 5


class Limited(Memory):
    ALLOCATE = Memory.ALLOCATE | {"empty", "empty_like", "new_empty_strided", "zero_"}


def bring(own, grads, arguments):
    return [ops._flex_bring(*own, *arguments, True, False)]


def bring_back(own, grads, arguments):
    return ops._flex_bring_back(*grads, *own, *arguments)


def by_groups(own, grads, arguments, backward: bool, groups: int = 4):
    token, given = group_ops._flex_start(*own, *arguments, groups, True, backward), None
    came = []
    for group, heads in enumerate(spans(HKV, groups)):
        came.append(group_ops._flex_arrive(token, None, *own, *arguments, groups, group, True))
        if backward:
            parts = [x.narrow(1, *heads) for x in grads]
            given = group_ops._flex_give(given, *parts, *own, *arguments, groups, group)
    return group_ops._flex_collect(given, *own, *arguments, groups) if backward else came


CALLS = {
    "bring": bring,
    "bring back": bring_back,
    "groups": functools.partial(by_groups, backward=False),
    "groups, backward": functools.partial(by_groups, backward=True),
}


def layout_of(kind: str | None, mask, ranks: int) -> str:
    if kind is None:
        return ""
    return {
        "head-tail": lambda: HeadTail(LENGTH, ranks),
        "rows": lambda: PerDocumentHeadTail([[1, LENGTH - 1], [LENGTH - 1, 1]], ranks),
        "blocks": lambda: BlockBalanced(mask, ranks),
        "many runs": lambda: BlockBalanced([1 + i * i % 7 for i in range(24)], ranks, block_size=4),
    }[kind]().text


def tensors_of(rank: int, ranks: int, mesh, kind: str | None, device: str = "cpu"):
    """Keys and values of a rank, gradients of all positions, and the ops' arguments for a mask."""
    mask = create_block_mask(
        lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, device, BLOCK_SIZE=8
    )
    arguments = (
        *mask.as_tuple()[2:6], LENGTH, LENGTH, [8, 8], [0, B, 0, HKV], [ranks], rank,
        ring_group_name(mesh, (0,)), layout_of(kind, mask, ranks), False, False,
    )  # fmt: skip
    rows = MaskJob(*arguments).keys.rows(rank)
    own, grads = (
        [torch.randn(B, HKV, length, dim, device=device) for dim in (D, DV)]
        for length in (rows, LENGTH)
    )
    return own, grads, arguments


@pytest.mark.parametrize("kind", [None, "head-tail", "rows", "blocks", "many runs"])
@pytest.mark.parametrize("known", [False, True], ids=["first call", "known call"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("failing", [(1,), (0, 2)], ids=str)
def test_memory_runs_out_anywhere(monkeypatch, failing, name, known, kind):
    if (name, kind) == ("bring back", "rows"):
        pytest.skip("collectives bring them back, which end with the process group")
    rooms, call = Rooms(monkeypatch), CALLS[name]

    def forget() -> None:
        for box in rooms._boxes.values():
            box.views.clear()

    def make(rank: int):
        place = tensors_of(rank, RANKS, init_device_mesh("cpu", (RANKS,)), kind)
        return functools.partial(call, *place), None if known else forget

    found = failures(rooms, RANKS, failing, Limited, make, len(failing))
    assert all((found[rank] > 0) == (rank in failing) for rank in range(RANKS)), found
    assert {"flex keys", "flex gradients"} & rooms.used


@pytest.mark.parametrize("pulls", [3, 4])
def test_memory_that_copies_write_to_goes_when_they_are_done(pulls):
    """If the error is between a pull and its wait, that pull is waited for. Otherwise the pull of
    the flags is."""
    box = mock.Mock(pulls=pulls)
    finish(box, 3)
    assert box.wait.called == (pulls == 4)
    assert box.pull.call_args_list == ([] if pulls == 4 else [mock.call([], [], then_wait=True)])


def test_later_pulls_are_completed_until_collectives_come_next(caplog):
    box, later, never = mock.Mock(pulls=3), mock.Mock(), mock.Mock()
    finish(box, 3, [later, later, None, never])
    flags = mock.call([], [], then_wait=True)
    assert (box.pull.call_args_list, later.pull.call_args_list) == ([flags], [flags, flags])
    assert not never.pull.called and not caplog.text


def test_the_calls_own_error_is_the_one_that_is_raised(caplog):
    """Also if the GPU is lost, so that flags cannot be raised either."""
    box = mock.Mock(pulls=3, pull=mock.Mock(side_effect=RuntimeError("CUDA error")))
    finish(box, 3)
    assert "may wait for this one" in caplog.text and "CUDA error" in caplog.text


def test_order_of_pulls():
    keys, gradients = False, True
    assert pulls_after(3, False, keys, 0) == [keys, keys]
    assert pulls_after(3, True, keys, 0) == [keys, gradients, keys, gradients, gradients]
    assert pulls_after(3, True, gradients, 0) == [keys, gradients, gradients]
    assert pulls_after(3, True, keys, 2) == [gradients, gradients]
    assert pulls_after(1, True, gradients, 0) == []
