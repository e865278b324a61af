"""Run FlexAttention with the sequence sharded over ranks, and check it against one device.

    torchrun --nproc-per-node 2 tools/flex_example.py

Checks causal and document masks and a learned relative bias: output, logsumexp and all gradients,
in natural order and in a balanced order. On GPUs the kernels are compiled. Without GPUs it runs on
gloo with the unfused op and only forward, because torch does not support FlexAttention's gradients
on CPU.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import (
    AuxRequest,
    and_masks,
    create_block_mask,
    flex_attention,
)

import cp_dispatch

BATCH, HEADS, KEY_HEADS, LENGTH, DIM = 2, 4, 2, 1000, 64


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def document_mask(documents):
    def same_document(b, h, q_idx, kv_idx):
        return documents[q_idx] == documents[kv_idx]

    return and_masks(causal, same_document)


def relative_bias(bias):
    def add_bias(score, b, h, q_idx, kv_idx):
        return score + bias[h, q_idx - kv_idx + LENGTH]

    return add_bias


def run(attend, query, key, value, grad, bias, block_mask, device) -> dict:
    """Output and logsumexp, and on GPUs the gradients, of one call."""
    trains = device == "cuda"
    inputs = [x.detach().requires_grad_(trains) for x in (query, key, value)]
    bias = bias.detach().requires_grad_(trains)
    out, aux = attend(
        *inputs, score_mod=relative_bias(bias), block_mask=block_mask, enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    results = {"output": out, "logsumexp": aux.lse}
    if trains:
        # A loss of both, so that autograd has a gradient for both.
        loss = (out * grad).sum() + aux.lse.sum()
        grads = torch.autograd.grad(loss, [*inputs, bias])
        results |= dict(zip(("dQ", "dK", "dV", "dBias"), grads, strict=True))
    return results


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("cp",))

    torch.manual_seed(0)  # the same tensors on every rank
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    whole = [torch.randn(BATCH, h, LENGTH, DIM, device=device) for h in heads]
    bias = torch.randn(HEADS, 2 * LENGTH + 1, device=device) / 4
    documents = torch.arange(LENGTH, device=device) // 300
    masks = {
        name: create_block_mask(mod, None, None, LENGTH, LENGTH, device)
        for name, mod in (("causal", causal), ("documents", document_mask(documents)))
    }
    attend = torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention

    worst = 0.0
    for layout in (None, cp_dispatch.HeadTail(LENGTH, ranks)):
        # This rank's rows; in the layout's order if there is one.
        local = cp_dispatch.shard(mesh, whole, 2, layout)
        query, key, value, grad = (
            DTensor.from_local(
                x, mesh, [Shard(2)], run_check=False, shape=full.shape, stride=full.stride()
            )
            for x, full in zip(local, whole, strict=True)
        )
        for name, mask in masks.items():
            want = run(attend, *whole, bias, mask, device)
            with cp_dispatch.enabled(layout=layout):
                if rank == 0 and layout is None:
                    print(f"\n{name}: {cp_dispatch.explain_flex(query, key, value, mask)}")
                got = run(attend, query, key, value, grad, bias, mask, device)
            errors = {}
            for what, x in got.items():
                if isinstance(x, DTensor):
                    x = cp_dispatch.unshard(mesh, x.to_local(), 2, layout)
                errors[what] = ((x - want[what]).norm() / want[what].norm()).item()
            worst = max(worst, *errors.values())
            if rank == 0:
                order = "natural order" if layout is None else "head-tail order"
                words = ", ".join(f"{what} {error:.1e}" for what, error in errors.items())
                print(f"{name}, {order}: relative errors {words}", flush=True)
    assert worst < 1e-3, f"off by {worst:.1e}"
    if rank == 0:
        print(f"\nequal to one device on {ranks} x {device}")
    dist.destroy_process_group()


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
