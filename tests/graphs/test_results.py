"""DTensors that compiled graphs return while cp_dispatch is on are the same as torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import cp_dispatch
from cp_dispatch import _compat
from cp_dispatch.graphs import results as graph_results
from tests.ranks import one_rank


@pytest.fixture
def mesh():
    torch._dynamo.reset()
    with one_rank() as mesh:
        yield mesh


def same(got: DTensor, want: DTensor) -> None:
    assert type(got) is DTensor
    assert _compat.dtensor_spec(got) == _compat.dtensor_spec(want)
    assert (got.requires_grad, got.is_leaf) == (want.requires_grad, want.is_leaf)
    assert torch.equal(got.to_local(), want.to_local())


def test_results_are_those_of_torch(mesh):
    """Forward and backward, with several results, shapes, graphs and placements."""

    def function(x, y):
        return (x * 2).sin(), y.transpose(0, 1) + 1

    def run():
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)
        found = []
        for step in range(6):
            placed = [Replicate()] if step % 2 else [Shard(0)]
            x, y = (
                DTensor.from_local(torch.arange(6.0).view(2, 3) * (step + 1), mesh, placed)
                .detach()
                .requires_grad_()
                for _ in "xy"
            )
            results = compiled(x, y)
            found += results
            found += torch.autograd.grad([r.sum() for r in results], [x, y])
            with torch.no_grad():
                found += compiled(x, y)
        return found

    want = run()
    with cp_dispatch.enabled():
        got = run()
        assert graph_results._known
    assert not graph_results._known
    for mine, theirs in zip(got, want, strict=True):
        same(mine, theirs)


def test_lengths_that_change(mesh):
    """One graph whose results have different sizes at each call."""
    compiled = torch.compile(lambda x: x * 2, backend="aot_eager", dynamic=True)
    with cp_dispatch.enabled():
        for length in (4, 5, 7, 4, 5):
            local = torch.arange(float(length))
            x = DTensor.from_local(local, mesh, [Shard(0)])
            got = compiled(x)
            assert got.shape == (length,) and torch.equal(got.to_local(), local * 2)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_is_made_again_looks_as_the_first_one(mesh, requires_grad):
    """Also if one description comes with different strides."""
    x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]).requires_grad_(requires_grad)
    names, description = x.__tensor_flatten__()
    inner = {name: getattr(x, name) for name in names}
    with cp_dispatch.enabled():
        for strides in ((3, 1), (1, 2)):
            first, again = (
                DTensor.__tensor_unflatten__(inner, description, x.shape, strides) for _ in "12"
            )
            for got in (first, again):
                assert (got.requires_grad, got.stride()) == (requires_grad, strides)
            assert _compat.dtensor_spec(again) is _compat.dtensor_spec(first), "made only once"


def test_what_is_known_is_bounded_and_goes(mesh, monkeypatch):
    monkeypatch.setattr(graph_results, "_MOST", 3)
    before = DTensor.__dict__["__tensor_unflatten__"]
    x = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    with cp_dispatch.enabled():
        assert DTensor.__dict__["__tensor_unflatten__"] is not before
        for factor in range(8):
            compiled = torch.compile(lambda x, n=factor: x * n, backend="aot_eager")
            assert compiled(x).to_local()[0] == factor
            assert len(graph_results._known) <= 3
    assert DTensor.__dict__["__tensor_unflatten__"] is before and not graph_results._known
    assert compiled(x).to_local()[0] == 7
