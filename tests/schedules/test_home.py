"""The work with a rank's own keys, in two parts."""

from __future__ import annotations

import pytest
import torch

from cp_dispatch.backends import BACKENDS
from cp_dispatch.dropout import Dropout
from cp_dispatch.layouts import Span, Tile
from cp_dispatch.schedules import home
from cp_dispatch.schedules.blocks import Rows
from cp_dispatch.schedules.home import Gradients, divided
from cp_dispatch.schedules.job import Job

LENGTH = 6
WHOLE = Tile(0, LENGTH, 0, LENGTH, True)


def tensors(heads: int, key_heads: int):
    torch.manual_seed(0)
    return [
        torch.randn(2, LENGTH, n, 8, dtype=torch.float64).transpose(1, 2)
        for n in (heads, key_heads, key_heads, heads)
    ]


@pytest.mark.parametrize("heads, key_heads, expected", [
    (8, 4, [((0, 4), (0, 2)), ((4, 4), (2, 2))]),
    (6, 3, [((0, 2), (0, 1)), ((2, 4), (1, 2))]),
    (8, 1, [((0, 4), (0, 1)), ((4, 4), (0, 1))]),
    (1, 1, [((0, 1), (0, 1))]),
])  # fmt: skip
def test_heads_are_divided_and_those_of_a_group_stay_together(heads, key_heads, expected):
    query, key, *_ = tensors(heads, key_heads)
    parts = divided(Job(None, None, 1.0), (WHOLE,), query, key)
    assert [(tuple(x.rows), tuple(x.keys)) for x in parts] == expected
    assert all(x.tiles == (WHOLE,) for x in parts)


def test_several_tiles_are_divided_instead_of_heads():
    query, key, *_ = tensors(8, 4)
    found = tuple(WHOLE._replace(query_start=i, query_length=2) for i in (0, 2, 4))
    parts = divided(Job(None, None, 1.0), found, query, key)
    assert [x.tiles for x in parts] == [found[:1], found[1:]]
    assert all(x.rows.length == 8 and x.keys.length == 4 for x in parts)
    assert divided(Job(None, None, 1.0), (), query, key) == ()


def test_a_part_has_its_heads_of_the_mask_and_of_dropout():
    query, key, *_ = tensors(8, 4)
    mask = torch.randn(2, 8, LENGTH, LENGTH)
    dropout = Dropout(0.5, torch.tensor(1), 0, 3, 16, LENGTH)
    job = Job(None, None, 1.0, mask=mask, dropout=dropout)
    jobs = [x.job for x in divided(job, (WHOLE,), query, key)]
    assert [x.dropout.head_start for x in jobs] == [3, 7]
    assert torch.equal(torch.cat([x.mask for x in jobs], 1), mask)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_parts_give_what_the_whole_does(key_heads):
    """With other tiles of all heads, and nothing for rows without a tile."""
    query, key, value, grad = tensors(4, key_heads)
    backend = BACKENDS["math"]
    job = Job(backend, None, 0.5)
    out, lse = backend.forward(query, key, value, None, True, job.scale)
    parts = divided(job, (WHOLE,), query, key)
    grads = Gradients(query, parts)
    for work in parts:
        grads.compute(work, Rows(grad, query, out, lse), key, value, None)
    dq, *of_keys, _ = backend.backward(grad, query, key, value, out, lse, None, True, job.scale)
    other = torch.randn(2, 4, 2, 8, dtype=torch.float64)
    grads.add(other, WHOLE._replace(query_start=3, query_length=2))
    dq[:, :, 3:5] += other
    torch.testing.assert_close(grads.finish(), dq)
    for index, want in enumerate(of_keys):
        found = [sum(x[index] for x in shares) for shares in grads.of_keys.values()]
        torch.testing.assert_close(torch.cat(found, 1), want)


def test_without_parts_there_are_only_other_shares():
    query, *_ = tensors(4, 2)
    grads = Gradients(query, ())
    share = torch.ones(2, 4, 2, 8, dtype=torch.float64)
    grads.add(share, WHOLE._replace(query_start=1, query_length=2))
    want = torch.zeros_like(query)
    want[:, :, 1:3] = 1
    assert torch.equal(grads.finish(), want)


def test_parts_with_all_heads_share_the_cuts_of_rows(monkeypatch):
    """Every cut is a view, which takes the host as long as a small op."""
    seen = []
    monkeypatch.setattr(home, "backward_block", lambda job, rows, *_: seen.append(rows) or [])
    x, lse = torch.ones(1, 4, 8, 4), torch.ones(1, 4, 8)
    rows, spans = Rows(x, x, x, lse), (Span(0, 4), Span(0, 2))
    parts = [home.Part(None, (), heads, heads) for heads in spans]
    grads = Gradients(x, parts)
    for part in parts:
        grads.compute(part, rows, x, x, None)
    assert seen[0] is rows and [y.size(1) for y in seen[1].tensors] == [2] * 4
