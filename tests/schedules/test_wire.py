"""What a message keeps alive while another stream reads and writes."""

import contextlib
import weakref

import pytest
import torch

from cp_dispatch.layouts import Span
from cp_dispatch.schedules.head_shares import Order
from cp_dispatch.schedules.wire import Homeward, Part, wire

ROWS, HEADS, DIM = 4, 2, 8


class OneRank:
    """A ring of one rank, whose messages arrive when they are waited for."""

    rank, world_size = 0, 1

    def mark(self):
        return None

    @contextlib.contextmanager
    def after(self, mark):
        yield

    def exchange_all(self, send, sizes, receive, coming):
        class Work:
            def wait(self):
                receive.copy_(send)

        return Work()


@pytest.mark.parametrize("ordered", [False, True])
def test_memory_stays_until_it_has_been_read(ordered):
    """This includes the index of the order. When it was freed early, it contained another index by
    the time that the side stream packed with it (wrong results on 4 GPUs with NCCL)."""
    part = Part(torch.float32, DIM, (Span(0, HEADS),))
    index = torch.tensor([2, 0, 3, 1])
    order = Order(index, index.argsort()) if ordered else None
    rows = torch.randn(1, ROWS, HEADS, DIM).transpose(1, 2)
    held = [weakref.ref(order.back)] if ordered else []
    want = rows.index_select(2, order.back) if ordered else rows.clone()
    message = Homeward(OneRank(), wire(1, (ROWS,), 0, (part,)), [[rows.clone()]], order)
    del order, index
    assert all(tensor() is not None for tensor in held)
    result = torch.empty(1, ROWS, HEADS, DIM).transpose(1, 2)
    message.wait(result)
    assert torch.equal(result, want)
    assert all(tensor() is None for tensor in held)


@pytest.mark.parametrize("rows_differ", [False, True])
def test_tensors_of_another_dtype_are_put_in_order_too(rows_differ):
    """Kernels may return float32 where the message holds bfloat16."""
    index = torch.tensor([[2, 0, 3, 1], [1, 3, 0, 2]])
    index = index if rows_differ else index[0]
    order = Order(index, index.argsort(-1))
    part = Part(torch.bfloat16, DIM, (Span(0, HEADS),))
    rows = torch.randn(2, HEADS, ROWS, DIM)
    message = Homeward(OneRank(), wire(2, (ROWS,), 0, (part,)), [[rows]], order)
    result = torch.empty(rows.shape, dtype=torch.bfloat16)
    message.wait(result)
    back = order.back.expand(2, ROWS)
    want = torch.stack([x[:, i] for x, i in zip(rows, back, strict=True)])
    assert torch.equal(result, want.bfloat16())


@pytest.mark.parametrize("dim", [1, 3, 4])
def test_dense_rows_of_any_size_go_home(dim):
    """In a message they begin at multiples of 16 bytes, so dense memory is not always one."""
    rows = torch.randn(1, ROWS, 1, dim).transpose(1, 2)
    part = Part(torch.float32, dim, (Span(0, 1),))
    message = Homeward(OneRank(), wire(1, (ROWS,), 0, (part,)), [[rows]], None)
    result = torch.empty(1, 1, ROWS, dim)
    message.wait(result)
    assert torch.equal(result, rows)
