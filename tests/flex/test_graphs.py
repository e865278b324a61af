"""What compiled graphs of one rank consist of, without running the others."""

from __future__ import annotations

import collections

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cp_dispatch
from tests.flex.problems import gradients_on_cpu
from tests.ranks import fake_ranks

LENGTH = 64


def graphs_of_a_call(needs_gradients: bool) -> list[tuple[dict[str, int], int]]:
    """Of each graph, the numbers of our ops, and how many int32 tensors it gets."""
    found = []

    def keep(graph, _):
        nodes = graph.graph.nodes
        ours = [x.target for x in nodes if getattr(x.target, "namespace", None) == "cp_dispatch"]
        given = [x.meta["val"] for x in nodes if x.op == "placeholder"]
        dtypes = [x.dtype for x in given if isinstance(x, torch.Tensor)]
        ops = collections.Counter(op.name().split("::")[1] for op in ours)
        found.append((ops, dtypes.count(torch.int32)))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    attend = torch.compile(flex_attention, fullgraph=True, backend=backend)
    own = LENGTH // 2  # each rank attends to its own rows, because there is no other rank
    mask = create_block_mask(
        lambda b, h, q, k: q // own == k // own, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=8
    )
    with fake_ranks(2) as mesh, gradients_on_cpu(), cp_dispatch.enabled():
        x = DTensor.from_local(torch.randn(1, 2, own, 4), mesh, [Shard(2)])
        leaves = [x.detach().requires_grad_(needs_gradients) for _ in "qkv"]
        out = attend(*leaves, block_mask=mask)
        if needs_gradients:
            torch.autograd.grad(out, leaves, out.detach())
    return found


def test_without_gradients_one_op_comes_before_the_kernel():
    ((ops, _),) = graphs_of_a_call(False)
    assert ops == {"flex_bring_and_cut": 1, "flex_listed": 1}


def test_a_backward_gets_the_lists_of_its_rows_as_one_tensor():
    """Besides the four tensors by which ops know the mask."""
    (forward, _), (backward, given) = graphs_of_a_call(True)
    assert forward == {"flex_bring": 1, "flex_cut": 1, "flex_listed": 1}
    assert backward == {"flex_bring": 1, "flex_bring_back": 1}
    assert given == 4 + 1
