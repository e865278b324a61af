"""Make the README's table of what works, from runs.

    torchrun --nproc-per-node 2 tools/support_table.py run cpu    # also: run cuda
    python tools/support_table.py write

``run`` tries every feature with every backend of a device, forward and backward, against float64 on
the whole sequence, and saves the outcomes in ``tools/results/support_<device>.json``. ``write``
puts the table into the README. A cell is

- "yes" if that kernel ran and its error is at most 1.3 times the same kernel's on one device;
- "math" if the call went to the math backend and was right;
- a ratio such as "1.84x efficient" (at most 3) if one device does not run the call with that kernel
  and was compared with another one;
- "raises" for a ContextParallelError;
- "torch" if the call was left to torch;
- "WRONG" otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import cp_dispatch

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "tools" / "results"
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
DEVICES = {"cpu": ("flash", "math"), "cuda": ("flash", "efficient", "cudnn", "math")}
FACTOR = 1.3


def mask(kind: str, batch: int, heads: int, rows: int, keys: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shapes = {"pad": (batch, 1, 1, keys), "rows": (rows, keys), "head": (1, heads, rows, keys)}
    if kind == "pad":
        keep = torch.ones(shapes[kind], dtype=torch.bool)
        keep[-1, ..., keys // 2 :] = False
        return keep
    if kind == "blind":
        keep = torch.rand(rows, keys, generator=generator) > 0.3
        keep[: rows // 4] = False
        return keep
    return torch.randn(shapes[kind], generator=generator)


def _documents(length: int, ranks: int):
    return cp_dispatch.PerDocumentHeadTail([37, 91, length - 128], ranks)


# name: keyword arguments of ``attempt``
FEATURES = {
    "causal": {"causal": True},
    "full": {},
    "GQA 8/2, causal": {"causal": True, "key_heads": 2},
    "MQA 8/1": {"key_heads": 1},
    "3 heads": {"heads": 3, "key_heads": 3, "causal": True},
    "head dim 36": {"dim": 36, "causal": True},
    "head dim 256": {"dim": 256, "causal": True},
    "value head dim 128, head dim 192": {"dim": 192, "value_dim": 128},
    "float32": {"dtype": torch.float32, "causal": True},
    "float16": {"dtype": torch.float16, "causal": True},
    "float64": {"dtype": torch.float64, "causal": True},
    "scale 0.3": {"scale": 0.3, "causal": True},
    "length 250": {"rows": 250, "keys": 250, "causal": True},
    "length 1": {"rows": 1, "keys": 1},
    "query 128, key 384, causal top-left": {"rows": 128, "keys": 384, "causal": True},
    "causal_lower_right, query 128, key 384": {"rows": 128, "keys": 384, "lower_right": True},
    "boolean padding mask": {"mask_kind": "pad"},
    "bias (Sq, Sk)": {"mask_kind": "rows"},
    "bias per head, sharded on rows": {"mask_kind": "head", "mask_at": [Shard(2)]},
    "bias sharded on keys": {"mask_kind": "head", "mask_at": [Shard(3)]},
    "bias that needs a gradient": {"mask_kind": "head", "mask_grad": True},
    "fully masked rows": {"mask_kind": "blind"},
    "dropout": {"dropout": 0.25},
    # Many heads, because the error of a few numbers is a matter of chance.
    "decode: query replicated, keys sharded": {
        "rows": 1,
        "heads": 128,
        "query_at": [Replicate()],
    },
    "query sharded, keys replicated": {"key_at": [Replicate()], "causal": True},
    "partial key and value": {"key_at": [Partial()]},
    "3-D inputs": {"leading": (2,), "causal": True},
    "5-D inputs": {"leading": (2, 2, 4), "causal": True},
    "batch sharded": {"query_at": [Shard(0)], "key_at": [Shard(0)], "causal": True},
    "heads sharded": {"query_at": [Shard(1)], "key_at": [Shard(1)], "causal": True},
    "second derivative": {"second": True},
    "head-tail layout, causal": {"causal": True, "balancer": cp_dispatch.HeadTail},
    "head-tail layout, length 250, causal": {
        "rows": 250,
        "keys": 250,
        "causal": True,
        "balancer": cp_dispatch.HeadTail,
    },
    "documents layout, causal": {"causal": True, "balancer": _documents},
    "head-tail layout, bias per head": {"mask_kind": "head", "balancer": cp_dispatch.HeadTail},
    "balanced by the mirror rank, ring": {"causal": True, "schedule": "mirrored_ring"},
    "balanced by the mirror rank, gather": {"causal": True, "schedule": "gather"},
    "gather, head-tail layout": {
        "causal": True,
        "schedule": "gather",
        "balancer": cp_dispatch.HeadTail,
    },
    "gather, not causal": {"schedule": "gather"},
    "ulysses": {"causal": True, "schedule": "ulysses"},
    "ulysses, head-tail layout": {
        "causal": True,
        "schedule": "ulysses",
        "balancer": cp_dispatch.HeadTail,
    },
    "ulysses, MQA 8/1, not causal": {"key_heads": 1, "schedule": "ulysses"},
}


def attempt(
    mesh, kernel, *, leading=None, heads=8, key_heads=None, rows=256, keys=256, dim=64,
    value_dim=None, dtype=None, causal=False, scale=None, mask_kind=None, mask_at=None,
    mask_grad=False, lower_right=False, dropout=0.0, query_at=None, key_at=None, second=False,
    balancer=None, schedule="ring",
) -> str:  # fmt: skip
    device = mesh.device_type
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    key_heads, value_dim = key_heads or heads, value_dim or dim
    lead, key_lead = leading or (2, heads), leading or (2, key_heads)
    sequence = [Shard(len(lead))]
    query_at, key_at = query_at or sequence, key_at or sequence
    torch.manual_seed(0)
    shapes = (*lead, rows, dim), (*key_lead, keys, dim), (*key_lead, keys, value_dim)
    tensors = [torch.randn(shape).to(device, dtype) for shape in shapes]
    gradient = torch.randn(*lead, rows, value_dim).to(device, dtype)
    bias = None if mask_kind is None else mask(mask_kind, 2, heads, rows, keys).to(device)
    if bias is not None and bias.is_floating_point():
        bias = bias.to(dtype)
    options = {"is_causal": causal, "scale": scale, "enable_gqa": key_heads != heads}

    def run(inputs, attn_mask, grad, **more):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=attn_mask, **options, **more)
        wanted = [*inputs, *([attn_mask] if mask_grad else [])]
        place = getattr(out, "placements", None)
        if place is not None:
            grad = distribute_tensor(grad, mesh, place, src_data_rank=None)
        return [out, *torch.autograd.grad(out, wanted, grad, create_graph=second)]

    layout = balancer(rows, mesh.size()) if balancer else None
    sequence_dim = len(lead)

    def leaf(x, placements=None, to=None):
        x = x.detach().to(to or x.dtype)
        if layout is not None and placements is not None:
            x = x.index_select(sequence_dim, layout.indices[0].to(x.device))
        if placements is not None:
            x = _distribute(x, mesh, placements)
        return x.requires_grad_()

    special = causal_lower_right(rows, keys) if lower_right else None
    single = [leaf(x, to=torch.float64) for x in tensors]
    with sdpa_kernel(SDPBackend.MATH):
        single_bias = bias
        if bias is not None and bias.is_floating_point():
            single_bias = leaf(bias, to=torch.float64)
        exact = run(single, special if lower_right else single_bias, gradient.double())

    sharded = [leaf(x, p) for x, p in zip(tensors, (query_at, key_at, key_at), strict=True)]
    attn_mask = special
    if bias is not None:
        attn_mask = _distribute(bias, mesh, mask_at or [Replicate()]).requires_grad_(mask_grad)
    sharded_gradient = gradient
    if layout is not None:
        sharded_gradient = gradient.index_select(sequence_dim, layout.indices[0].to(device))
    with (
        sdpa_kernel([KERNELS[kernel], SDPBackend.MATH], set_priority=True),
        cp_dispatch.enabled(schedule=schedule, layout=layout),
    ):
        plan = cp_dispatch.explain(*sharded, attn_mask=attn_mask, dropout_p=dropout, **options)
        try:
            got = run(sharded, attn_mask, sharded_gradient, dropout_p=dropout)
            if second:
                got[1].sum().backward()
        except cp_dispatch.ContextParallelError:
            return "raises"
        except Exception:
            if plan.handler != "stock":
                raise
            return "torch raises"
    ran = (plan.backend or "stock").removeprefix("cpu_")
    if dropout:
        # Attention with dropout is still linear in value, and something must be dropped.
        lhs, rhs = ((a.full_tensor().double() * b).sum() for a, b in
                    ((got[0], gradient), (got[3], tensors[2])))  # fmt: skip
        change = (got[0].full_tensor().double() - exact[0]).norm() / exact[0].norm()
        right = abs(lhs - rhs) < 2e-2 * abs(lhs) and 0.05 < change < 2
        return _cell(0.0 if right else torch.inf, ran, kernel)
    expected = kernel if ran == "stock" else ran
    judge, one = _one_device(
        expected, tensors, special if lower_right else bias, mask_grad, run, gradient
    )
    ratio = 0.0
    for mine, alone, true in zip(got, one, exact, strict=True):
        allowed = (alone.double() - true).norm().item()
        if allowed == 0 or dtype is torch.float64:
            # Either one device is exact to the last bit, as for a softmax over one key, or the
            # reference is no more exact than the result. Then the rounding of a dot product over
            # the head dim is allowed in every element.
            allowed = torch.finfo(dtype).eps * (true.numel() * dim) ** 0.5 / FACTOR
        mine = mine.full_tensor()
        if layout is not None:
            mine = mine.index_select(sequence_dim, layout.inverse[0].to(device))
        error = (mine.double() - true).norm().item()
        ratio = max(ratio, error / allowed if error == error else torch.inf)
    return _cell(ratio, ran, kernel, judge, expected)


def _one_device(ran, tensors, attn_mask, mask_grad, run, gradient):
    """``(kernel, results)`` of one device: with the kernel that ran or, if that refuses the call (a
    mask, causal with different lengths), with the next best one."""
    flat = [x.flatten(0, -4) if x.ndim > 4 else x.unsqueeze(1) if x.ndim == 3 else x
            for x in (*tensors, gradient)]  # fmt: skip
    for kernel in (ran, "efficient", "math"):
        leaves = [x.detach().requires_grad_() for x in flat[:3]]
        bias = attn_mask
        if mask_grad:
            bias = attn_mask.detach().requires_grad_()
        try:
            with sdpa_kernel(KERNELS.get(kernel, SDPBackend.MATH)):
                results = run(leaves, bias, flat[3])
        except RuntimeError:
            continue
        shapes = [x.shape for x in (gradient, *tensors)] + [x.shape for x in results[4:]]
        return kernel, [x.reshape(shape) for x, shape in zip(results, shapes, strict=True)]
    raise RuntimeError("no kernel of one device takes this call")


def _distribute(tensor, mesh, placements):
    if isinstance(placements[0], Partial):
        return DTensor.from_local(tensor / mesh.size(), mesh, placements, run_check=False)
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def _cell(ratio: float, ran: str, kernel: str, judge: str = "", expected: str = "") -> str:
    if ratio > FACTOR:
        # A different, more exact kernel on one device does not measure this kernel's rounding.
        return f"{ratio:.2f}x {judge}" if judge != expected and ratio < 3 else f"WRONG {ratio:.2f}x"
    return "yes" if ran == kernel else {"stock": "torch"}.get(ran, ran)


def run_all(device: str) -> None:
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    table = {}
    for feature, how in FEATURES.items():
        table[feature] = {}
        for kernel in DEVICES[device]:
            cell = attempt(mesh, kernel, **how)
            cells = [None] * mesh.size()
            dist.all_gather_object(cells, cell)
            table[feature][kernel] = cell if set(cells) == {cell} else f"ranks differ: {cells}"
        if rank == 0:
            print(f"{feature:42s} {table[feature]}", flush=True)
    if rank == 0:
        record = {
            "card": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "ranks": mesh.size(),
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
            "table": table,
        }
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"support_{device}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def write() -> None:
    records = {d: json.loads((RESULTS / f"support_{d}.json").read_text()) for d in DEVICES}
    columns = [(device, kernel) for device, kernels in DEVICES.items() for kernel in kernels]
    heads = [f"{'CPU' if device == 'cpu' else 'CUDA'} {kernel}" for device, kernel in columns]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for feature in FEATURES:
        cells = [
            records[device]["table"].get(feature, {}).get(kernel, "not run")
            for device, kernel in columns
        ]
        # In the CUDA run of 2026-11-28 torch's own kernels were compared with its math kernel.
        cells = ["torch" if cell.endswith(" stock") else cell for cell in cells]
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    sources = "; ".join(
        f"{r['ranks']} x {r['card']}, torch {r['torch']}, {r['date']}" for r in records.values()
    )
    lines += ["", f"Made by `tools/support_table.py` from runs on {sources}."]
    readme = ROOT / "README.md"
    text = readme.read_text()
    begin, end = "<!-- support table -->", "<!-- end of support table -->"
    before, rest = text.split(begin)
    readme.write_text(before + begin + "\n" + "\n".join(lines) + "\n" + end + rest.split(end)[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run").add_argument("device", choices=("cpu", "cuda"))
    commands.add_parser("write")
    args = parser.parse_args()
    if args.command == "run":
        run_all(args.device)
    else:
        write()
