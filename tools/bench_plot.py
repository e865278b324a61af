"""Plot results of ``tools/bench.py``: the share kept by tokens per GPU and by number of ranks.

    python tools/bench_plot.py tools/results/2026-11-28-4xh100-causal-*.json -o kept.png

Results of several files go into one picture, with a curve for each implementation. An axis is drawn
only if there are several values along it; with one value along both, there are only points. A run
that failed (out of memory) is a cross at 0.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence

MODES = {"fwd": "forward", "fwd+bwd": "forward + backward"}
AXES = {"tokens_per_rank": "tokens per GPU", "ranks": "ranks"}
# The fields in which two rows of one curve must agree.
SHAPE = ("backend", "heads", "head_dim", "batch", "causal", "documents", "dtype")


def curves(
    rows: Sequence[dict], axis: str, least: int = 2
) -> dict[tuple, dict[str, list[tuple[int, float]]]]:
    """``{panel: {implementation: [(x, share kept)]}}``, with the curves that have at least
    ``least`` points. A panel is a mode, a shape, and the value along the other axis."""
    (other,) = set(AXES) - {axis}
    panels: dict[tuple, dict[str, dict[int, float]]] = {}
    for row in rows:
        failed = "error" in row and "kept" not in row
        if not failed and "kept" not in row:
            continue
        shape = tuple(tuple(x) if isinstance(x := row.get(name, 0), list) else x for name in SHAPE)
        panel = panels.setdefault((row["mode"], row[other], *shape), {})
        panel.setdefault(row["implementation"], {})[row[axis]] = 0.0 if failed else row["kept"]
    return {
        key: {name: sorted(curve.items()) for name, curve in panel.items() if len(curve) >= least}
        for key, panel in panels.items()
        if any(len(curve) >= least for curve in panel.values())
    }


def title(axis: str, panel: tuple) -> str:
    (other,) = set(AXES) - {axis}
    mode, value, backend, heads, dim, batch, causal, documents, dtype = panel
    heads = "/".join(map(str, heads))
    mask = "causal" if causal else f"documents of {documents:,}" if documents else "full"
    words = f"{backend}, {MODES[mode]}, {mask}, {value:,} {AXES[other]}"
    return f"{words}\n{batch} x {heads} heads of {dim}, {dtype}"


def draw(rows: Sequence[dict], path: pathlib.Path, caption: str = "") -> int:
    """Write a picture with a panel for each mode, shape and axis; returns how many there are.

    Raises:
        SystemExit: there is nothing to draw, or no matplotlib.
    """
    found = [(axis, key, panel) for axis in AXES for key, panel in curves(rows, axis).items()]
    if not found:  # a run of one length
        axis = "tokens_per_rank"
        found = [(axis, key, panel) for key, panel in curves(rows, axis, 1).items()]
    if not found:
        raise SystemExit("nothing to plot: no row has a share that was kept")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("to plot, install matplotlib: pip install 'cp_dispatch[bench]'") from error

    columns = min(2, len(found))
    lines = -(-len(found) // columns)
    figure = Figure(figsize=(6.4 * columns, 4.8 * lines), layout="constrained")
    names = list(dict.fromkeys(name for _, _, panel in found for name in panel))
    for number, (axis, key, panel) in enumerate(found, 1):
        axes = figure.add_subplot(lines, columns, number)
        for name, points in panel.items():
            shade = f"C{names.index(name) % 10}"
            marker = ".sv^"[names.index(name) // 10]
            style = "-" if name.startswith("cp_dispatch") else "--" if "torch" in name else ":"
            ran = [(x, kept * 100) for x, kept in points if kept > 0]
            axes.plot(*zip(*ran, strict=True) if ran else ([], []), style, marker=marker,
                      color=shade, label=name)  # fmt: skip
            failed = [x for x, kept in points if kept == 0]
            axes.plot(failed, [0] * len(failed), "x", color=shade)
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in panel.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
        axes.set(xlabel=AXES[axis], ylabel="kept, %", ylim=(0, None))
        axes.set_title(title(axis, key), fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(caption, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=pathlib.Path, nargs="+")
    parser.add_argument("-o", "--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    records = [json.loads(path.read_text()) for path in args.files]
    caption = "; ".join(dict.fromkeys(f"{r['card']}, torch {r['torch']}" for r in records))
    count = draw([row for record in records for row in record["rows"]], args.out, caption)
    print(f"{args.out}: {count} panels")


if __name__ == "__main__":
    main()
