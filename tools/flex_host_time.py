"""Measure the host time of a compiled flex_attention call on tiny DTensors, ours against torch's
call on plain tensors of a shard's size.

    torchrun --nproc-per-node 4 tools/flex_host_time.py     # CUDA if available, else gloo
    python tools/flex_host_time.py --fake 4 --profile window

Times are measured as in ``tools/host_time.py``, of known calls: everything was compiled, and the
mask was seen, before. On CPU they include torch's kernel and gloo's messages (but --fake has none),
and there is no backward.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from host_time import measure, profile
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cp_dispatch

TOKENS = 128  # per rank: one block of a mask
HEADS, KEY_HEADS, DIM = 2, 1, 16
MASKS = {
    "window": lambda b, h, q, k: (q >= k) & (q - k < 100),
    "documents": lambda b, h, q, k: (q >= k) & (q // 100 == k // 100),
    "causal": lambda b, h, q, k: q >= k,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--fake", type=int, metavar="RANKS", help="one process, no communication")
    parser.add_argument("--profile", choices=MASKS, help="run cProfile on this mask, on rank 0")
    return parser.parse_args()


def steps(inputs, mask, attend):
    """A forward without gradients, and a forward with its backward."""
    leaves = [x.detach().requires_grad_() for x in inputs]

    def forward():
        with torch.no_grad():
            return attend(*inputs, block_mask=mask, enable_gqa=True)

    def both():
        out = attend(*leaves, block_mask=mask, enable_gqa=True)
        return torch.autograd.grad(out, leaves, out.detach())

    return {"forward": forward, "forward + backward": both}


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    if args.fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.fake)
    else:
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    tell = print if dist.get_rank() == 0 else lambda *_, **__: None
    card = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    tell(f"{mesh.size()} x {card}, torch {torch.__version__}, us a call")
    shards = [
        torch.randn(1, n, TOKENS, DIM, device=args.device) for n in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    placed = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in shards]
    attend = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def timed(name: str, inputs, length: int, mask_mod) -> None:
        mask = create_block_mask(mask_mod, None, None, length, length, args.device)
        for mode, step in steps(inputs, mask, attend).items():
            if args.device == "cuda" or mode == "forward":
                tell(f"{name:22} {mode:18} {measure(step, args) * 1e6:7.1f}", flush=True)
                if args.profile == name:
                    profile(step, args, tell)

    timed("torch, plain tensors", shards, TOKENS, MASKS["causal"])
    length = TOKENS * mesh.size()
    for kind, mask_mod in MASKS.items():
        with cp_dispatch.enabled():
            timed(kind, placed, length, mask_mod)
    with cp_dispatch.enabled(layout=cp_dispatch.HeadTail(length, mesh.size())):
        timed("causal, head-tail", placed, length, MASKS["causal"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
