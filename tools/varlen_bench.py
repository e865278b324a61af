"""Time sharded ``varlen_attn``: one GPU, this project, and keys gathered by hand.

    torchrun --nproc-per-node 4 tools/varlen_bench.py --tokens 8192 --tokens 32768

The documents are packed and causal. "kept" is (one GPU's time for the whole sequence / ranks) /
time, with the same kernel and the same documents in the same run. "sent" is the amount that the
rank with the most traffic sends in a forward. Torch has no context parallelism for ``varlen_attn``.
"gathered by hand" is what users write instead: an all-gather of all keys and values, and one call
for this rank's rows, whose backward is a reduce-scatter (as Llama 3 was trained, arXiv:2407.21783,
section 3.3.2).

Times are measured as in ``tools/bench.py``. Without GPUs only our own implementations run, which
tests the program and measures nothing. Results of GPUs go to a JSON file in ``tools/results/``,
unless ``--out`` is given.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import json
import pathlib
import tempfile
import warnings

import torch
import torch.distributed as dist
from bench_problems import document_lengths, rows
from bench_record import about
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.varlen import varlen_attn

import cp_dispatch
from cp_dispatch import BlockBalanced, HeadTail, PerDocumentHeadTail

RESULTS = pathlib.Path(__file__).parent / "results"
# Torch 2.11 accepts grouped heads without this argument.
GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, action="append", help="per rank")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("H", "HKV"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--document-mean", type=int, action="append", help="mean length in tokens (default: 4096)"
    )
    parser.add_argument("--window", type=int, help="tokens that a row sees (default: all)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="steps per timed round, back to back")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--only", action="append", help="run only implementations whose name contains this"
    )
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    args.cuda_graph = False  # documents are read on the host
    return args


class Problem:
    """Documents of one length, as ``starts``: cumulative lengths, int32."""

    def __init__(self, args, mesh, tokens: int, mean: int):
        self.args, self.mesh, self.tokens, self.mean = args, mesh, tokens, mean
        self.length = tokens * mesh.size()
        self.device = torch.device(mesh.device_type)
        self.documents = document_lengths(self.length, mean)
        ends = itertools.accumulate(self.documents, initial=0)
        self.starts = torch.tensor(list(ends), dtype=torch.int32, device=self.device)
        self.window = (-1 if args.window is None else args.window - 1, 0)

    def tensors(self, length: int) -> list[torch.Tensor]:
        """query, key, value, grad_output ``(length, H, D)``."""
        heads, key_heads = self.args.heads
        dtype = getattr(torch, self.args.dtype)
        return [
            torch.randn(length, n, self.args.head_dim, device=self.device, dtype=dtype)
            for n in (heads, key_heads, key_heads, heads)
        ]

    def attend(self, query, key, value):
        longest = max(self.documents)
        return varlen_attn(
            query, key, value, self.starts, self.starts, longest, longest,
            window_size=self.window, **GQA,
        )  # fmt: skip


def sent(size: int) -> dict:
    return {"sent_mib": size / 2**20}


# Each implementation: problem -> (inputs, grad, call, what it sends). Entered as a context.
@contextlib.contextmanager
def one_device(problem: Problem):
    *inputs, grad = problem.tensors(problem.length)
    yield inputs, grad, problem.attend, sent(0)


@contextlib.contextmanager
def ours(problem: Problem, balancer=None):
    ranks = problem.mesh.size()
    layout = None if balancer is None else balancer(problem, ranks)
    with cp_dispatch.enabled(layout=layout):
        *inputs, grad = (
            DTensor.from_local(x, problem.mesh, [Shard(0)], run_check=False)
            for x in problem.tensors(problem.tokens)
        )
        plan = cp_dispatch.explain_varlen(
            *inputs, problem.starts, problem.starts, window_size=problem.window
        )
        yield inputs, grad, problem.attend, sent(max(map(plan.bytes_sent, range(ranks))))


@contextlib.contextmanager
def by_hand(problem: Problem):
    """Gather all keys on all ranks, and compute this rank's rows in one call.

    The call has the keys from the start of the rank's first document up to its last row. Among
    those keys its rows are the last ones of each document, and the kernel aligns the causal mask to
    the bottom right.
    """
    mesh, tokens = problem.mesh, problem.tokens
    begin = mesh.get_local_rank() * tokens
    end = begin + tokens
    starts = problem.starts.tolist()
    first = max(x for x in starts if x <= begin)
    inside = [x for x in starts if begin < x < end]
    cu_rows, cu_keys = (
        torch.tensor([x - bounds[0] for x in bounds], dtype=torch.int32, device=problem.device)
        for bounds in ([begin, *inside, end], [first, *inside, end])
    )
    longest = int(cu_rows.diff().max()), int(cu_keys.diff().max())
    # Deprecated since torch 2.13; before that, its replacement has no gradient.
    warnings.filterwarnings("ignore", "`torch.distributed._functional_coll", FutureWarning)

    def attend(query, key, value):
        key, value = (
            all_gather_tensor_autograd(x, 0, mesh)[first:end].contiguous() for x in (key, value)
        )
        return varlen_attn(
            query, key, value, cu_rows, cu_keys, *longest, window_size=problem.window, **GQA
        )

    *inputs, grad = problem.tensors(tokens)
    yield inputs, grad, attend, sent((mesh.size() - 1) * sum(x.nbytes for x in inputs[1:]))


IMPLEMENTATIONS = {
    "one device": one_device,
    "cp_dispatch": ours,
    "cp_dispatch, head-tail": lambda p: ours(p, lambda p, ranks: HeadTail(p.length, ranks)),
    "cp_dispatch, document head-tail": lambda p: ours(
        p, lambda p, ranks: PerDocumentHeadTail(p.documents, ranks)
    ),
    "cp_dispatch, near blocks": lambda p: ours(
        p, lambda p, ranks: BlockBalanced.from_documents(p.documents, ranks, near=True)
    ),
    "gathered by hand": by_hand,
}


def run_point(problem: Problem, args, cuda: bool):
    """Yield a row for each implementation and mode as soon as it is measured."""
    shape = {
        "tokens_per_rank": problem.tokens,
        "ranks": problem.mesh.size(),
        "heads": list(args.heads),
        "head_dim": args.head_dim,
        "dtype": args.dtype,
        "document_mean": problem.mean,
        "window": args.window,
        "steps": args.steps,
    }
    chosen = {
        name: implementation
        for name, implementation in IMPLEMENTATIONS.items()
        if (not args.only or any(word in name for word in (*args.only, "one device")))
        # Torch has no kernel for plain tensors on CPU.
        and (cuda or name.startswith("cp_dispatch"))
    }
    return rows(problem, args, cuda, chosen, shape, ("fwd", "fwd+bwd"), f"of {problem.mean}")


def main() -> None:
    args = parse()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if cuda:
        torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda" if cuda else "cpu", (ranks,), mesh_dim_names=("cp",))
    torch.manual_seed(rank)
    record = about(cuda) | {"kind": "varlen", "rows": []}
    card = record["card"].split()[-1].lower()
    folder = RESULTS if cuda else pathlib.Path(tempfile.gettempdir())
    out = args.out or folder / f"{record['date']}-{ranks}x{card}-varlen.json"
    if rank == 0:
        print(f"{record['card']} x {ranks}, torch {record['torch']}")
    for tokens, mean in itertools.product(
        args.tokens or [8192, 32768], args.document_mean or [4096]
    ):
        for row in run_point(Problem(args, mesh, tokens, mean), args, cuda):
            record["rows"].append(row)
            if rank == 0:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(record, indent=1) + "\n")
    if rank == 0:
        print(f"wrote {out}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
