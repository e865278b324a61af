"""Write the benchmark tables of the README and of tools/results from the saved results.

    python tools/bench_table.py

Each table is between ``<!-- bench FILE ... -->`` and ``<!-- end -->``. The first marker names the
file of results, or several files of one kind and one day.
"""

from __future__ import annotations

import argparse
import json
import operator
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ROOT / "README.md", ROOT / "tools" / "results" / "README.md"


def steps_of(row: dict) -> str:
    return "1 step" if row["steps"] == 1 else f"{row['steps']} steps"


def table(record: dict) -> str:
    """The efficiency of each implementation by kernel, and the extra memory of its forward and
    backward."""
    rows = [row for row in record["rows"] if "kept" in row]
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    modes = {"fwd": "forward", "fwd+bwd": "forward + backward"}
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    cells = {(r["implementation"], r["backend"], r["mode"]): r for r in rows}
    heads = [f"{backend} {modes[mode]}" for backend in backends for mode in modes]
    memory = f"extra memory ({', '.join(backends)})" if len(backends) > 1 else "extra memory"
    lines = [f"| | {' | '.join(heads)} | {memory} |", "|---" * (len(heads) + 2) + "|"]
    for name in names:
        kept = [
            f"{cells[key]['kept'] * 100:.1f}%{_instead(cells[key])}"
            if (key := (name, b, m)) in cells
            else ""
            for b in backends
            for m in modes
        ]
        extra = [
            f"{cells[key]['extra_mib']:,.0f}"
            for b in backends
            if (key := (name, b, "fwd+bwd")) in cells
        ]
        memory = f"{' / '.join(extra)} MiB" if extra else ""
        lines.append(f"| {name} | {' | '.join(kept)} | {memory} |")
    one = rows[0]
    heads, key_heads = one["heads"]
    lines += [
        "",
        f"{one['tokens_per_rank']:,} tokens per GPU on {one['ranks']} x {record['card']}, "
        f"{_mask_of(one)}, {one['dtype']}, {heads} query and "
        f"{key_heads} key/value heads of {one['head_dim']}, {steps_of(one)} per timed round, "
        f"{'replayed as CUDA graphs, ' if one.get('cuda_graph') else ''}"
        f"torch {record['torch']}, {record['date']}.",
    ]
    return "\n".join(lines)


def _instead(row: dict) -> str:
    """The schedule that ran if it is not the row's, which does not take every call."""
    own, _, wish = row["implementation"].partition(" ")
    wish, ran = wish.partition(",")[0].replace(" ", "_"), row.get("schedule") or ""
    alike = wish == "auto" or wish.removeprefix("natural_") in ran
    return f" ({ran})" if own == "cp_dispatch" and ran and not alike else ""


def _mask_of(row: dict) -> str:
    if row.get("documents"):
        return f"documents of {row['documents']:,} tokens on average by a boolean mask"
    return "causal" if row["causal"] else "not causal"


def train_table(record: dict) -> str:
    """Speed and memory of each way to train a model, and how much the losses differ."""
    lines = [
        "| | compiled | tokens/s per rank | step | peak memory | model TFLOP/s per rank | losses |",
        "|---" * 7 + "|",
    ]
    for row in record["rows"]:
        cells = [row["way"], row["compiled"]]
        if "error" in row:
            lines.append(f"| {' | '.join(cells)} | {row['error']} | | | | |")
            continue
        cells[1] += f" ({row['graphs']} graphs)" if row["graphs"] else ""
        first, last = (row["losses"][i] for i in (0, -1))
        losses = f"{first:.4f} to {last:.4f}"
        if "losses_differ" in row:
            losses += f", differ {row['losses_differ']:.1e}"
            losses += f" (first gradients {row['gradients_differ']:.1e})"
        memory = f"{row['peak_mib'] / 1024:,.1f} GiB" if row["peak_mib"] else "not measured"
        lines.append(
            f"| {' | '.join(cells)} | {row['tokens_per_second_per_rank']:,.0f} | "
            f"{row['seconds'] * 1e3:,.0f} ms | {memory} | {row['model_tflops_per_rank']:,.3g} | "
            f"{losses} |"
        )
    one = record["settings"]
    heads, key_heads = one["heads"]
    lines += [
        "",
        f"{one['tokens']:,} tokens on {record['ranks']} x {record['card']}, {one['layers']} layers "
        f"of {one['dim']}, {heads} query and {key_heads} key/value heads of "
        f"{one['dim'] // heads}, a vocabulary of {one['vocab']:,}, FSDP2, {one['dtype']}, "
        f"attention by {one['kernel'] or 'the kernel that torch takes'}, "
        f"{'one checkpoint per block' if one['checkpoint'] else 'no checkpoints'}, median of "
        f"{one['steps'] - one['warmup']} steps after {one['warmup']}; tolerances: losses "
        f"{record['noise'][0]:.0e}, the first step's gradients of query and key projections "
        f"{record['noise'][1]:.0e}. torch {record['torch']}, {record['date']}.",
    ]
    return "\n".join(lines)


def host_table(record: dict) -> str:
    """Host time of a call in each way."""
    modes = {
        "forward": "forward",
        "both": "forward + backward",
        "both_one_thread": "the same without autograd's threads",
        "both_of_chain": "one of a chain of 8",
    }
    modes = {mode: words for mode, words in modes.items() if mode in record["rows"][0]}
    lines = [f"| us | {' | '.join(modes.values())} |", "|---" * (1 + len(modes)) + "|"]
    for row in record["rows"]:
        lines.append(f"| {row['name']} | {' | '.join(f'{row[mode]:,.0f}' for mode in modes)} |")
    lines += [
        "",
        f"{record['tokens']} tokens per GPU on {record['ranks']} x {record['card']}, "
        f"{record['kernel']} kernel, 8 heads of 64, bfloat16, causal, median of calls on the "
        f"slowest rank. torch {record['torch']}, {record['date']}.",
    ]
    return "\n".join(lines)


def flex_table(record: dict) -> str:
    """The efficiency of each way to run FlexAttention, for each mask."""
    rows = [row for row in record["rows"] if "kept" in row]
    cells = {(r["mask"], r["implementation"], r["mode"]): r for r in rows}
    lines = [
        "| mask | | forward | forward + backward | extra memory | sent |",
        "|---" * 6 + "|",
    ]
    for mask, name in dict.fromkeys((r["mask"], r["implementation"]) for r in rows):
        forward, both = (cells.get((mask, name, mode)) for mode in ("fwd", "fwd+bwd"))
        kept = [f"{row['kept'] * 100:.1f}%" if row else "" for row in (forward, both)]
        last = both or forward
        lines.append(
            f"| {mask} | {name} | {' | '.join(kept)} | {last['extra_mib']:,.0f} MiB | "
            f"{last['sent_mib']:,.0f} MiB |"
        )
    one = rows[0]
    heads, key_heads = one["heads"]
    sizes = {"documents": "documents of {document_mean:,} tokens on average, ",
             "window": "a window of {window:,}, "}  # fmt: skip
    steps = {row["mask"]: steps_of(row) for row in rows}
    masks = "".join(text.format(**one) for mask, text in sizes.items() if mask in steps)
    others = [f"{mask}: {text}" for mask, text in steps.items() if text != steps_of(one)]
    lines += [
        "",
        f"FlexAttention, {one['tokens_per_rank']:,} tokens per GPU on {one['ranks']} x "
        f"{record['card']}, {one['dtype']}, {heads} query and {key_heads} key/value heads of "
        f"{one['head_dim']}, {masks}{steps_of(one)} per timed round"
        f"{' (' + ', '.join(others) + ')' if others else ''}; "
        f"{'replayed as CUDA graphs; ' if one.get('cuda_graph') else ''}sent: in the forward, by "
        f"the rank that sends the most. torch {record['torch']}, {record['date']}.",
    ]
    return "\n".join(lines)


def varlen_table(record: dict) -> str:
    """The efficiency of each way to run ``varlen_attn``, for each length and documents."""
    rows = [row for row in record["rows"] if "kept" in row]
    name = operator.itemgetter("tokens_per_rank", "document_mean", "implementation")
    cells = {(*name(row), row["mode"]): row for row in rows}
    lines = [
        "| tokens per GPU | documents | | forward | forward + backward | extra memory | sent |",
        "|---" * 7 + "|",
    ]
    for key in dict.fromkeys(map(name, rows)):
        forward, both = (cells.get((*key, mode)) for mode in ("fwd", "fwd+bwd"))
        kept = [f"{row['kept'] * 100:.1f}%" if row else "" for row in (forward, both)]
        last = both or forward
        lines.append(
            f"| {key[0]:,} | {key[1]:,} | {key[2]} | {' | '.join(kept)} | "
            f"{last['extra_mib']:,.0f} MiB | {last['sent_mib']:,.0f} MiB |"
        )
    one = rows[0]
    heads, key_heads = one["heads"]
    window = f", a window of {one['window']:,}" if one["window"] else ""
    lines += [
        "",
        f"`varlen_attn` on {one['ranks']} x {record['card']}, causal{window}, {one['dtype']}, "
        f"{heads} query and {key_heads} key/value heads of {one['head_dim']}, documents: mean "
        f"length in tokens, {steps_of(one)} per timed round; sent: in the forward, by the rank "
        f"that sends the most. torch {record['torch']}, {record['date']}.",
    ]
    return "\n".join(lines)


TABLES = {"train": train_table, "host": host_table, "flex": flex_table, "varlen": varlen_table}


def joined(records: list[dict]) -> dict:
    """The rows of several files as one record, if everything else is the same."""
    first, *others = ({k: v for k, v in record.items() if k != "rows"} for record in records)
    for other in others:
        if other != first:
            raise ValueError(f"one table of {first} and {other}")
    return first | {"rows": [row for record in records for row in record["rows"]]}


def filled(text: str) -> str:
    """The page with its tables rewritten from the results."""

    def made(match: re.Match) -> str:
        files = [ROOT / "tools" / "results" / name for name in match[1].split()]
        record = joined([json.loads(file.read_text()) for file in files])
        lines = TABLES.get(record.get("kind"), table)(record)
        return f"<!-- bench {match[1]} -->\n{lines}\n<!-- end -->"

    return re.sub(r"<!-- bench (\S+(?: \S+)*) -->.*?<!-- end -->", made, text, flags=re.DOTALL)


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
