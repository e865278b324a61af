"""Write the table of predicted times on many ranks, from the constants of one kind of GPU.

    python tools/predict_table.py nvidia-h200

It is in ``README.md``, between ``<!-- predicted -->`` and
``<!-- end of predicted -->``. Only the constants are measured. Nodes of 8 GPUs are assumed to be
like the measured host, and the links between nodes are the assumed ones below.
"""

from __future__ import annotations

import argparse
import pathlib
import re

import torch

from cp_dispatch import HeadTail
from cp_dispatch.costs import Constants, Links, constants_of
from cp_dispatch.plan import Plan
from cp_dispatch.planning.planner import alternatives

ROOT = pathlib.Path(__file__).parents[1]
#: 400 Gb/s for each GPU of a node of 8, and the time that a message between nodes takes in addition
#: to its bytes.
LINKS = Links(node=8, bandwidth=50e9, latency=10e-6)
#: The memory of a GPU for what a schedule holds in addition to its inputs.
MEMORY = 64 * 2**30
RANKS = tuple(2**n for n in range(3, 11))
COLUMNS = ("ring", "gather", "ulysses", "hybrid")


def plan_of(tokens: int, ranks: int, backend: str, heads: int, key_heads: int, dim: int) -> Plan:
    """A causal call in head-tail order."""
    length = tokens * ranks
    return Plan(
        "cp_dispatch",
        backend=backend,
        schedule="ring",
        layout=HeadTail(length, ranks),
        is_causal=True,
        mesh_dims=(0,),
        ring_shape=(ranks,),
        query_length=length,
        key_length=length,
        shards=tuple((1, h, tokens, dim) for h in (heads, key_heads, key_heads)),
        dtype=torch.bfloat16,
    )


def row(constants: Constants, tokens: int, ranks: int, args) -> dict[str, float]:
    """The efficiency of a forward and backward with each schedule that fits."""
    plan = plan_of(tokens, ranks, args.backend, *args.heads, args.head_dim)
    flops = 2 * args.heads[0] * plan.query_length**2 * args.head_dim
    call = args.backend, args.head_dim
    alone = sum(
        constants.kernel(*call, f"{way} causal", args.heads[0], flops * times)
        for way, times in (("forward", 1), ("backward", 2.5))
    )
    kept: dict[str, float] = {}
    for candidate, prediction in alternatives(plan, "cuda", False, constants, LINKS):
        name, seconds = candidate.schedule, sum(prediction)
        if max(candidate.extra_bytes()) > MEMORY:
            continue
        kept[name] = max(kept.get(name, 0.0), alone / ranks / seconds)
    return kept


def table(constants: Constants, args) -> str:
    lines = [
        f"| tokens per GPU | ranks | {' | '.join(COLUMNS)} |",
        "|---" * (2 + len(COLUMNS)) + "|",
    ]
    for tokens in args.tokens:
        for ranks in RANKS:
            kept = row(constants, tokens, ranks, args)
            best = max(kept.values())
            cells = [
                "does not fit" if name not in kept
                else f"**{kept[name]:.0%}**" if kept[name] == best else f"{kept[name]:.0%}"
                for name in COLUMNS
            ]  # fmt: skip
            lines.append(f"| {tokens:,} | {ranks} | {' | '.join(cells)} |")
    about = constants.about
    heads, key_heads = args.heads
    lines += [
        "",
        f"**Predicted**, not measured: efficiency of a forward and backward, causal, head-tail "
        f"order, {args.backend}, {heads} query and {key_heads} key/value heads of "
        f"{args.head_dim}, bfloat16, from constants of {about['ranks']} x {constants.device} "
        f"(torch {about['torch']}, {about['date']}), nodes of {LINKS.node}, and an assumed "
        f"{LINKS.bandwidth * 8 / 1e9:.0f} Gb/s per GPU and {LINKS.latency * 1e6:.0f} us between "
        f"nodes. A schedule does not fit if it would hold more than {MEMORY // 2**30} GiB, or "
        "if there are too few heads for it.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", help="name of a file in cp_dispatch/costs, or a path to one")
    parser.add_argument("--backend", default="cudnn")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dry", action="store_true", help="print the table, do not write the page")
    args = parser.parse_args()
    path = pathlib.Path(args.kind)
    constants = Constants.from_json(path.read_text()) if path.is_file() else constants_of(args.kind)
    if constants is None:
        parser.error(f"no constants of {args.kind}; run `python -m cp_dispatch calibrate`")
    text = table(constants, args)
    print(text)
    if args.dry:
        return
    page = ROOT / "README.md"
    filled = f"<!-- predicted -->\n{text}\n<!-- end of predicted -->"
    old = r"<!-- predicted -->.*?<!-- end of predicted -->"
    page.write_text(re.sub(old, lambda _: filled, page.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
