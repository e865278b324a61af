"""Time sharded FlexAttention: one GPU, this project and torch's context-parallel FlexAttention.

    torchrun --nproc-per-node 4 tools/flex_bench.py --tokens 8192 --tokens 32768

Inputs are DTensors or, for "style", plain shards given to a ``ContextParallel`` module inside a
compiled module. "kept" is (one GPU's time for the whole sequence / ranks) / time, with the same
compiled kernel and the same mask in the same run. "sent" is the amount that the rank with the most
traffic sends in a forward. "groups" is the number of groups of heads whose transfers overlap with
kernels; ``--groups`` sets it. ``CP_DISPATCH_COPY_ENGINES=0`` selects NCCL.

Times are measured as in ``tools/bench.py``; ``--cuda-graph`` replays steps without the host, which
has read the mask before. Results of GPUs go to a JSON file in ``tools/results/``, unless ``--out``
is given.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import pathlib
import tempfile

import torch
import torch.distributed as dist
from bench_problems import document_ids, document_lengths, rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cp_dispatch
from cp_dispatch import BlockBalanced, HeadTail, PerDocumentHeadTail, create_cp_block_mask
from cp_dispatch.flex import groups

RESULTS = pathlib.Path(__file__).parent / "results"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, action="append", help="per rank")
    parser.add_argument("--mask", action="append", choices=("causal", "documents", "window"))
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("H", "HKV"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--document-mean", type=int, default=4096)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument(
        "--groups", type=int, help="groups of heads, wherever keys are assumed to travel"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps per timed round, back to back")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--cuda-graph", action="store_true", help="time replays of captured steps")
    parser.add_argument(
        "--only", action="append", help="run only implementations whose name contains this"
    )
    parser.add_argument("--out", type=pathlib.Path)
    return parser.parse_args()


class Problem:
    """One mask at one length; ``alone`` is a mesh of this rank."""

    def __init__(self, args, mesh, alone, tokens: int, kind: str):
        self.args, self.mesh, self.tokens, self.kind = args, mesh, tokens, kind
        self.length = tokens * mesh.size()
        self.device = torch.device(mesh.device_type)
        self.dtype = getattr(torch, args.dtype)
        self.documents = document_lengths(self.length, args.document_mean)
        self.mask_mod = self._mask_mod()
        # Built for some rows at a time, because all at once take 16 GiB at 131,072 tokens.
        self.mask = create_cp_block_mask(
            self.mask_mod, None, None, self.length, self.length, alone, layout=None
        )

    def _mask_mod(self):
        window = self.args.window
        if self.kind == "causal":
            return lambda b, h, q, k: q >= k
        if self.kind == "window":
            return lambda b, h, q, k: (q >= k) & (q - k < window)
        ids = document_ids(self.documents, self.device)
        return lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])

    def tensors(self, length: int) -> list[torch.Tensor]:
        """query, key, value, grad_output ``(B, H, length, D)``."""
        heads, key_heads = self.args.heads
        return [
            torch.randn(
                self.args.batch, n, length, self.args.head_dim, device=self.device, dtype=self.dtype
            )
            for n in (heads, key_heads, key_heads, heads)
        ]

    @property
    def shard_bytes(self) -> int:
        """Bytes of a rank's keys and values."""
        args = self.args
        row = 2 * args.batch * args.heads[1] * args.head_dim * self.dtype.itemsize
        return row * self.tokens


def compiled(problem: Problem):
    torch._dynamo.reset()
    if problem.device.type != "cuda":
        return flex_attention
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def sent(size: int, groups: int = 1) -> dict:
    return {"sent_mib": size / 2**20, "groups": groups}


# Each implementation: problem -> (inputs, grad, call, what it sends). Entered as a context.
@contextlib.contextmanager
def one_device(problem: Problem):
    *inputs, grad = problem.tensors(problem.length)
    attend = compiled(problem)
    yield inputs, grad, lambda *x: attend(*x, block_mask=problem.mask, enable_gqa=True), sent(0)


def layout_of(problem: Problem, balancer: str | None):
    ranks = problem.mesh.size()
    return {
        None: lambda: None,
        "head-tail": lambda: HeadTail(problem.length, ranks),
        "documents": lambda: PerDocumentHeadTail(problem.documents, ranks),
        "blocks": lambda: BlockBalanced(problem.mask, ranks),
        "near blocks": lambda: BlockBalanced(problem.mask, ranks, near=True),
    }[balancer]()


def dtensors(problem: Problem, shards):
    return [DTensor.from_local(x, problem.mesh, [Shard(2)], run_check=False) for x in shards]


def moved(problem: Problem, query, key, value) -> dict:
    plan = cp_dispatch.explain_flex(query, key, value, problem.mask)
    return sent(max(map(plan.bytes_sent, range(problem.mesh.size()))), plan.groups)


@contextlib.contextmanager
def ours(problem: Problem, schedule: str, balancer: str | None):
    attend = compiled(problem)
    with cp_dispatch.enabled(schedule=schedule, layout=layout_of(problem, balancer)):
        *inputs, grad = dtensors(problem, problem.tensors(problem.tokens))
        call = functools.partial(attend, block_mask=problem.mask, enable_gqa=True)
        yield inputs, grad, call, moved(problem, *inputs)


@contextlib.contextmanager
def in_style(problem: Problem, balancer: str | None):
    """Plain shards given to a ``ContextParallel`` module inside a compiled one."""
    torch._dynamo.reset()

    class Attention(torch.nn.Module):
        def forward(self, query, key, value, block_mask):
            return flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention()

        def forward(self, *args):
            return self.attention(*args)

    layout, block = layout_of(problem, balancer), Block()
    style = cp_dispatch.ContextParallel(attention_type="flex", balancer=layout)
    style._apply(block.attention, problem.mesh)
    if problem.device.type == "cuda":
        block = torch.compile(block, fullgraph=True, dynamic=False)
    *inputs, grad = problem.tensors(problem.tokens)
    with cp_dispatch.enabled(layout=layout):  # for counting memory; the style does not need it
        sends = moved(problem, *dtensors(problem, inputs))
        yield inputs, grad, lambda *x: block(*x, problem.mask), sends


@contextlib.contextmanager
def torch_cp(problem: Problem, balancer: str):
    from torch.distributed.tensor.experimental import _context_parallel as torchs
    from torch.distributed.tensor.experimental._context_parallel import _attention as attention

    ranks, device = problem.mesh.size(), problem.mesh.device_type
    found = {
        "head-tail": lambda: torchs._HeadTailLoadBalancer(problem.length, ranks, device),
        "documents": lambda: torchs._PerDocumentHeadTailLoadBalancer(
            [problem.documents], ranks, device
        ),
        "PTRR": lambda: torchs._PTRRLoadBalancer(problem.mask, ranks),
    }[balancer]()
    # Uncompiled, because inductor takes minutes for it at these lengths.
    attention._compiled_create_block_mask = create_block_mask
    mask = attention._create_cp_block_mask(
        problem.mask_mod, 1, 1, problem.length, problem.length, problem.mesh, found
    )
    attend = compiled(problem)

    class Attention(torch.nn.Module):
        def forward(self, query, key, value):
            return attend(query, key, value, block_mask=mask, enable_gqa=True)

    kind = torchs._ContextParallel.AttentionType.FLEX
    module = torchs._ContextParallel(seq_dim=2, attention_type=kind)._apply(
        Attention(), problem.mesh
    )
    *inputs, grad = problem.tensors(problem.tokens)
    yield inputs, grad, module, sent((ranks - 1) * problem.shard_bytes)


IMPLEMENTATIONS = {
    "one device": (one_device, ("causal", "documents", "window")),
    "cp_dispatch": (lambda p: ours(p, "auto", None), ("causal", "documents", "window")),
    "cp_dispatch, head-tail": (lambda p: ours(p, "auto", "head-tail"), ("causal",)),
    "cp_dispatch gather, head-tail": (lambda p: ours(p, "gather", "head-tail"), ("causal",)),
    "cp_dispatch, document head-tail": (lambda p: ours(p, "auto", "documents"), ("documents",)),
    "cp_dispatch ring, head-tail": (lambda p: ours(p, "ring", "head-tail"), ("causal",)),
    "cp_dispatch ring": (lambda p: ours(p, "ring", None), ("documents", "window")),
    "cp_dispatch, blocks": (lambda p: ours(p, "auto", "blocks"), ("causal", "documents")),
    "cp_dispatch, near blocks": (lambda p: ours(p, "auto", "near blocks"), ("documents",)),
    "cp_dispatch style": (lambda p: in_style(p, None), ("causal", "documents", "window")),
    "cp_dispatch style, near blocks": (lambda p: in_style(p, "near blocks"), ("documents",)),
    "torch cp, head-tail": (
        lambda p: torch_cp(p, "head-tail"), ("causal", "documents", "window"),
    ),
    "torch cp, document head-tail": (lambda p: torch_cp(p, "documents"), ("documents",)),
    "torch cp, PTRR": (lambda p: torch_cp(p, "PTRR"), ("causal", "documents", "window")),
}  # fmt: skip


def run_point(problem: Problem, args, cuda: bool):
    """Yield a row for each implementation and mode as soon as it is measured."""
    shape = {
        "mask": problem.kind,
        "tokens_per_rank": problem.tokens,
        "ranks": problem.mesh.size(),
        "heads": list(args.heads),
        "head_dim": args.head_dim,
        "batch": args.batch,
        "dtype": args.dtype,
        "document_mean": args.document_mean,
        "window": args.window,
        "steps": args.steps,
        "cuda_graph": args.cuda_graph,
    }

    def is_asked(name: str) -> bool:
        return not args.only or any(
            word == name if word in IMPLEMENTATIONS else word in name
            for word in (*args.only, "one device")
        )

    chosen = {
        name: implementation
        for name, (implementation, kinds) in IMPLEMENTATIONS.items()
        if problem.kind in kinds and is_asked(name)
    }
    # Torch refuses FlexAttention gradients on CPU.
    modes = ("fwd", "fwd+bwd") if cuda else ("fwd",)
    return rows(problem, args, cuda, chosen, shape, modes, problem.kind)


def main() -> None:
    args = parse()
    if args.groups:
        groups.COUNTS, groups.LEAST_ROWS, groups.LEAST_BYTES = (args.groups,), 0, 0
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    if cuda:
        torch.cuda.set_device(rank)
    shape = dist.get_world_size(), 1
    both = init_device_mesh("cuda" if cuda else "cpu", shape, mesh_dim_names=("cp", "alone"))
    mesh, alone = both["cp"], both["alone"]
    torch.manual_seed(rank)
    card = torch.cuda.get_device_name() if cuda else "cpu"
    if rank == 0:
        print(f"{card} x {mesh.size()}, torch {torch.__version__}")
    date = datetime.date.today().isoformat()
    name = f"{date}-flex-{mesh.size()}x{card.split()[1] if cuda else 'cpu'}".lower()
    # A trial without GPUs is not a result.
    out = args.out or (RESULTS if cuda else pathlib.Path(tempfile.gettempdir())) / f"{name}.json"
    record = {
        "card": card,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": date,
        "kind": "flex",
        "rows": [],
    }
    for tokens in args.tokens or [8192, 32768]:
        for kind in args.mask or ["causal", "documents", "window"]:
            for row in run_point(Problem(args, mesh, alone, tokens, kind), args, cuda):
                record["rows"].append(row)
                if rank == 0:  # after each row, because compilation may exceed the time limit
                    out.parent.mkdir(parents=True, exist_ok=True)
                    out.write_text(json.dumps(record, indent=1) + "\n")
    if rank == 0:
        print(f"wrote {out}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
