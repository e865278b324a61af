"""The README's tables of speed, made from the results that ``tools/bench.py`` kept.

    python tools/bench_table.py

Each table stands between markers that name its file: ``<!-- bench FILE -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]


def table(record: dict) -> str:
    """Share kept of each implementation, and its extra memory in a forward and backward."""
    rows = [row for row in record["rows"] if "kept" in row]
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    modes = {"fwd": "forward", "fwd+bwd": "forward + backward"}
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    cells = {(r["implementation"], r["backend"], r["mode"]): r for r in rows}
    heads = [f"{backend} {modes[mode]}" for backend in backends for mode in modes]
    lines = [f"| | {' | '.join(heads)} | extra memory |", "|---" * (len(heads) + 2) + "|"]
    for name in names:
        kept = [
            f"{cells[key]['kept'] * 100:.1f}%" if (key := (name, b, m)) in cells else ""
            for b in backends
            for m in modes
        ]
        extra = max(
            cells[key]["extra_mib"] for b in backends if (key := (name, b, "fwd+bwd")) in cells
        )
        lines.append(f"| {name} | {' | '.join(kept)} | {extra:,.0f} MiB |")
    one = rows[0]
    heads, key_heads = one["heads"]
    lines += [
        "",
        f"{one['tokens_per_rank']:,} tokens per GPU on {one['ranks']} x {record['card']}, "
        f"{'causal' if one['causal'] else 'not causal'}, {one['dtype']}, {heads} query and "
        f"{key_heads} key/value heads of {one['head_dim']}, {one['steps']} steps per timed round, "
        f"torch {record['torch']}, {record['date']}.",
    ]
    return "\n".join(lines)


def main() -> None:
    readme = ROOT / "README.md"

    def filled(match: re.Match) -> str:
        record = json.loads((ROOT / "tools" / "results" / match[1]).read_text())
        return f"<!-- bench {match[1]} -->\n{table(record)}\n<!-- end -->"

    text = re.sub(
        r"<!-- bench (\S+) -->.*?<!-- end -->", filled, readme.read_text(), flags=re.DOTALL
    )
    readme.write_text(text)


if __name__ == "__main__":
    main()
