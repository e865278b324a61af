"""Helpers for the benchmarks of FlexAttention and varlen_attn: documents, steps and rows."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from bench_record import failure
from bench_timing import measure

from cp_dispatch.schedules import mailboxes


def document_lengths(length: int, mean: int) -> list[int]:
    """Lengths that are uniform in [1, 2 * mean), the same on every rank, until the sequence is
    full."""
    generator = torch.Generator().manual_seed(0)
    lengths, left = [], length
    while left:
        size = min(left, int(torch.randint(1, 2 * mean, (), generator=generator)))
        lengths.append(size)
        left -= size
    return lengths


def document_ids(lengths: list[int], device) -> torch.Tensor:
    """The number of each position's document."""
    numbers = torch.arange(len(lengths), device=device)
    return torch.repeat_interleave(numbers, torch.tensor(lengths, device=device))


def steps(inputs, grad, call):
    """A forward without gradients, and a forward with its backward, by the mode's name."""

    def forward():
        with torch.no_grad():
            return call(*inputs)

    leaves = [x.detach().requires_grad_() for x in inputs]

    def both():
        return torch.autograd.grad(call(*leaves), leaves, grad)

    return {"fwd": forward, "fwd+bwd": both}


def rows(problem, args, cuda: bool, implementations: dict, shape: dict, modes, words):
    """Yield a row for each implementation and mode as soon as it is measured.

    An implementation is a function of the problem. The context that it returns gives inputs, grad,
    call and the other fields of its rows. The one named "one device" comes first. ``shape`` holds
    the fields of all rows, ``words`` what distinguishes this point in print.
    """
    alone = {}
    for name, implementation in implementations.items():
        for mode in modes:
            row = shape | {"implementation": name, "mode": mode}
            try:
                with implementation(problem) as (inputs, grad, call, facts):
                    row |= measure(steps(inputs, grad, call)[mode], args, cuda) | facts
                del inputs, grad, call
            except (RuntimeError, NotImplementedError, AssertionError) as error:
                row |= failure(error)
            if "seconds" in row:
                if name == "one device":
                    alone[mode] = row["seconds"]
                elif mode in alone:
                    row["kept"] = alone[mode] / problem.mesh.size() / row["seconds"]
            if dist.get_rank() == 0:
                print(show(row, words), flush=True)
            yield row
            gc.collect()
            if cuda:
                mailboxes.free()  # so that the next one's memory is counted alone
                torch.cuda.empty_cache()


def show(row: dict, words: str) -> str:
    text = f"{row['tokens_per_rank']:7d} {words:9s} {row['mode']:8s} "
    text += f"{row['implementation']:32s} "
    if "error" in row:
        return text + row["error"]
    text += f"{row['seconds'] * 1e3:9.3f} ms"
    text += f"  kept {row['kept'] * 100:5.1f}%" if "kept" in row else " " * 13
    text += f"  host {row['host_seconds'] * 1e3:7.3f} ms  extra {row['extra_mib']:7.0f} MiB"
    text += f"  sent {row['sent_mib']:7.1f} MiB"
    return text + (f" in {row['groups']}" if "groups" in row else "")
