"""Plots which rank owns which rows of a mask, and the work of each rank."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from cp_dispatch.errors import ContextParallelError
from cp_dispatch.layouts import Balancer, BlockBalanced, HeadTail, PerDocumentHeadTail
from cp_dispatch.layouts.balancer import max_over_mean, positive_int

MASKS = "causal, full, documents:LENGTH,LENGTH,... or sliding:WINDOW"
BALANCERS = ("head-tail", "documents", "blocks", "near-blocks", "none")
_MOST_PIXELS = 512
# Distinguishable with colour blindness too; more ranks than these use a colour map.
_COLOURS = ["#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#97bbf5", "#9c6b4e"]
_INK, _FAINT = "#2b2b33", "#b9bac2"


@dataclass(frozen=True, eq=False)
class IntervalMask:
    """A mask in which every row sees an interval of keys, ``first[i] <= j <= last[i]``.

    ``first`` and ``last`` are ``(S,)`` int64 on CPU, ``doc_lengths`` add up to S.
    """

    name: str
    first: torch.Tensor
    last: torch.Tensor
    doc_lengths: tuple[int, ...]

    @property
    def seq_len(self) -> int:
        return len(self.first)

    @property
    def pairs(self) -> torch.Tensor:
        """``(S,)`` int64: keys that each row sees."""
        return self.last - self.first + 1


def parse_mask(text: str, seq_len: int | None = None) -> IntervalMask:
    """The mask for a text such as ``sliding:512``.

    Raises:
        ContextParallelError: if the text is invalid, or if its documents are not ``seq_len`` long.
    """
    kind, _, numbers = text.partition(":")
    try:
        sizes = [positive_int(int(n), f"the number in --mask {text}") for n in numbers.split(",")]
    except ValueError:
        sizes = []
    expected = {"causal": 0, "full": 0, "sliding": 1, "documents": max(len(sizes), 1)}
    if kind not in expected or len(sizes) != expected[kind] or (numbers and not sizes):
        raise ContextParallelError(f"--mask must be {MASKS}, got {text!r}")
    lengths = tuple(sizes) if kind == "documents" else (seq_len or 4096,)
    if seq_len not in (None, sum(lengths)):
        raise ContextParallelError(
            f"the documents of --mask {text} are {sum(lengths)} positions long, but --seq-len is "
            f"{seq_len}"
        )
    rows = torch.arange(sum(lengths))
    first, last = torch.zeros_like(rows), rows
    if kind == "full":
        last = torch.full_like(rows, len(rows) - 1)
    elif kind == "documents":
        sizes = torch.tensor(lengths)
        first = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    elif kind == "sliding":
        first = (rows - sizes[0] + 1).clamp(min=0)
    return IntervalMask(text, first, last, lengths)


def make_balancer(
    kind: str, mask: IntervalMask, world_size: int, block_size: int = 128
) -> Balancer | None:
    """One of :data:`BALANCERS` for a mask; None for natural order."""
    if kind == "head-tail":
        return HeadTail(mask.seq_len, world_size)
    if kind == "documents":
        return PerDocumentHeadTail(mask.doc_lengths, world_size)
    if kind in ("blocks", "near-blocks"):
        if mask.seq_len % block_size:
            raise ContextParallelError(
                f"{mask.seq_len} positions are not a multiple of --block-size {block_size}"
            )
        work = mask.pairs.view(-1, block_size).sum(1)
        return BlockBalanced(work, world_size, block_size, near=kind == "near-blocks")
    if kind == "none":
        return None
    raise ContextParallelError(f"--balancer must be one of {', '.join(BALANCERS)}, got {kind!r}")


def work_per_rank(
    mask: IntervalMask, balancer: Balancer | None, world_size: int, row: int = 0
) -> list[int]:
    """(query, key) pairs of each rank under a mask, in natural order without a balancer."""
    if balancer is None:
        lengths = HeadTail(mask.seq_len, world_size).shard_lengths
        return [int(part.sum()) for part in mask.pairs.split(lengths)]
    return [int(mask.pairs[balancer.positions(r)[row]].sum()) for r in range(world_size)]


def owner_of_rows(
    mask: IntervalMask, balancer: Balancer | None, world_size: int, row: int = 0
) -> torch.Tensor:
    """``(S,)`` int64: the rank that owns each position."""
    lengths = HeadTail(mask.seq_len, world_size).shard_lengths
    ranks = torch.repeat_interleave(torch.arange(world_size), torch.tensor(lengths))
    return ranks if balancer is None else ranks[balancer.inverse[row]]


def plot(mask: IntervalMask, balancer: Balancer | None, world_size: int, path, row: int = 0):
    """Draw a mask with its rows coloured by owner, and work per rank before and after.

    Args:
        mask: what every row sees.
        balancer: who owns which rows; None for natural order. Of several layouts, ``row`` is drawn.
        world_size: number of ranks.
        path: where the picture goes; the ending says the format.

    Raises:
        ContextParallelError: without matplotlib, or where mask and balancer do not fit.
    """
    if balancer is not None and (balancer.seq_len, balancer.world_size) != (
        mask.seq_len,
        world_size,
    ):
        raise ContextParallelError(
            f"{balancer} is for {balancer.seq_len} positions on {balancer.world_size} ranks, but "
            f"the mask has {mask.seq_len} on {world_size}"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import to_rgb
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ContextParallelError("plots need matplotlib: pip install matplotlib") from error
    colours = torch.tensor([to_rgb(colour) for colour in _rank_colours(world_size)])
    # Without pyplot there is no state to leave behind and no display to need.
    figure = Figure(figsize=(11, 5.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.15])
    name = "natural order" if balancer is None else type(balancer).__name__
    figure.suptitle(
        f"mask {_short(mask.name)}, {mask.seq_len:,} positions on {world_size} ranks: {name}",
        color=_INK, fontsize=13,
    )  # fmt: skip
    _draw_mask(left, mask, owner_of_rows(mask, balancer, world_size, row), colours)
    natural = work_per_rank(mask, None, world_size)
    balanced = work_per_rank(mask, balancer, world_size, row)
    _draw_work(right, natural, None if balancer is None else balanced, name, colours.tolist())
    for axes in left, right:
        axes.tick_params(colors=_INK, length=3, labelsize=9)
        for spine in axes.spines.values():
            spine.set_color(_FAINT)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ContextParallelError(f"cannot write {path}: {error}") from error


def _draw_mask(axes, mask: IntervalMask, owner: torch.Tensor, colours: torch.Tensor) -> None:
    size = min(mask.seq_len, _MOST_PIXELS)
    centres = ((torch.arange(size) + 0.5) * mask.seq_len / size).long()
    keys = torch.arange(size + 1) * mask.seq_len / size
    first, last = mask.first[centres, None], mask.last[centres, None] + 1
    # How much of each pixel the row sees.
    seen = (torch.minimum(keys[1:], last) - torch.maximum(keys[:-1], first)).clamp(min=0)
    seen = (seen * size / mask.seq_len).clamp(max=1).unsqueeze(-1)
    solid = colours[owner[centres]].unsqueeze(1)
    pale = 1 - (1 - solid) * 0.13
    image = seen * solid + (1 - seen) * pale
    axes.imshow(
        image.numpy(), extent=(0, mask.seq_len, mask.seq_len, 0), interpolation="nearest",
    )  # fmt: skip
    axes.set_xlabel("key position", color=_INK)
    axes.set_ylabel("query position", color=_INK)
    axes.set_title("rows in the colour of the rank that owns them", color=_INK, fontsize=10)


def _draw_work(axes, natural: list, balanced: list | None, name: str, colours: list) -> None:
    """Work over the mean work, so that the tallest bar is the imbalance."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    ranks = range(len(natural))
    mean = sum(natural) / len(natural)
    handles, labels = [], []
    groups = [("natural order", natural)] + ([(name, balanced)] if balanced else [])
    width = 0.8 / len(groups)
    for i, (label, work) in enumerate(groups):
        is_last = i == len(groups) - 1
        fill = colours if is_last else [_FAINT] * len(work)
        middle = [rank + (i - (len(groups) - 1) / 2) * width for rank in ranks]
        axes.bar(middle, [x / mean for x in work], width * 0.94, color=fill)
        handles.append(tuple(Patch(facecolor=colour, linewidth=0) for colour in fill[:4]))
        labels.append(f"{label}: imbalance {max_over_mean(work):.3f}")
    axes.axhline(1, color=_INK, linewidth=1, linestyle=(0, (4, 3)), zorder=3)
    top = max(max(work) for _, work in groups) / mean
    axes.set_ylim(0, top * 1.22)
    digits = 0 if mean >= 100 else 2
    step = -(-len(natural) // 16)
    axes.set_xticks(list(ranks)[::step])
    axes.set_xlim(-0.6, len(natural) - 0.4)
    axes.set_xlabel("rank", color=_INK)
    axes.set_ylabel("work / mean work of a rank", color=_INK)
    axes.set_title(
        f"work per rank; 1 is {mean:,.{digits}f} (query, key) pairs", color=_INK, fontsize=10
    )
    axes.legend(
        handles, labels, loc="upper left", frameon=False, fontsize=10, labelcolor=_INK,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)


def _rank_colours(count: int) -> list:
    if count <= len(_COLOURS):
        return _COLOURS[:count]
    from matplotlib import colormaps

    return [colormaps["turbo"](0.06 + 0.88 * i / (count - 1))[:3] for i in range(count)]


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


# -- Command line -------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mask", default="causal", help=MASKS)
    parser.add_argument("--balancer", default="head-tail", choices=BALANCERS)
    words = "length of the sequence (default: that of the documents, or 4096)"
    parser.add_argument("--seq-len", type=int, help=words)
    parser.add_argument("--world-size", type=int, default=8, help="number of ranks (default: 8)")
    words = "block size of the balancers blocks and near-blocks (default: 128)"
    parser.add_argument("--block-size", type=int, default=128, help=words)
    words = "image file to write (default: layout.png)"
    parser.add_argument("-o", "--output", default="layout.png", help=words)


def run(arguments: argparse.Namespace) -> None:
    if arguments.seq_len is not None:
        positive_int(arguments.seq_len, "--seq-len")
    world_size = positive_int(arguments.world_size, "--world-size")
    block_size = positive_int(arguments.block_size, "--block-size")
    mask = parse_mask(arguments.mask, arguments.seq_len)
    balancer = make_balancer(arguments.balancer, mask, world_size, block_size)
    plot(mask, balancer, world_size, arguments.output)
    natural = max_over_mean(work_per_rank(mask, None, world_size))
    balanced = max_over_mean(work_per_rank(mask, balancer, world_size))
    print(f"{arguments.output}: imbalance {balanced:.4f}, in natural order {natural:.4f}")
