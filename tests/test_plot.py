"""Plots of layouts: what they show, also from the command line."""

import sys

import pytest
import torch

from cp_dispatch import BlockBalanced, ContextParallelError, HeadTail, PerDocumentHeadTail
from cp_dispatch.__main__ import main
from cp_dispatch.layouts.balancer import max_over_mean
from cp_dispatch.plot import (
    BALANCERS,
    make_balancer,
    owner_of_rows,
    parse_mask,
    plot,
    work_per_rank,
)


def dense(mask) -> torch.Tensor:
    keys = torch.arange(mask.seq_len)
    return (mask.first[:, None] <= keys) & (keys <= mask.last[:, None])


def test_masks():
    row, key = torch.arange(8)[:, None], torch.arange(8)
    causal = row >= key
    document = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    want = {
        "causal": causal,
        "full": torch.ones(8, 8, dtype=bool),
        "sliding:3": causal & (row - key < 3),
        "documents:3,4,1": causal & (document[:, None] == document),
    }
    for text, scores in want.items():
        mask = parse_mask(text, 8)
        assert torch.equal(dense(mask), scores), text
        assert torch.equal(mask.pairs, scores.sum(1))
    assert parse_mask("documents:3,4,1").seq_len == 8
    assert parse_mask("causal").seq_len == 4096


@pytest.mark.parametrize("text", ["causal", "full", "sliding:5", "documents:9,3,12"])
@pytest.mark.parametrize("kind", BALANCERS)
def test_work_per_rank(text, kind):
    """The bars are the numbers of visible scores in each rank's rows."""
    mask = parse_mask(text, 24)
    balancer = make_balancer(kind, mask, 3, block_size=4)
    owner = owner_of_rows(mask, balancer, 3)
    want = [int(dense(mask)[owner == rank].sum()) for rank in range(3)]
    assert work_per_rank(mask, balancer, 3) == want
    natural = [int(part.sum()) for part in dense(mask).chunk(3)]
    assert work_per_rank(mask, None, 3) == natural
    own = {"causal": "head-tail", "documents:9,3,12": "documents"}
    if "blocks" in kind or kind == own.get(text):
        assert want == [balancer.work(rank) for rank in range(3)]


def test_balancers():
    mask = parse_mask("documents:8,8")
    assert make_balancer("head-tail", mask, 2) == HeadTail(16, 2)
    assert make_balancer("documents", mask, 2) == PerDocumentHeadTail([8, 8], 2)
    assert make_balancer("blocks", mask, 2, 4) == BlockBalanced.from_documents([8, 8], 2, 4)
    assert make_balancer("near-blocks", mask, 2, 4).near
    assert make_balancer("none", mask, 2) is None
    assert owner_of_rows(parse_mask("causal", 8), HeadTail(8, 2), 2).tolist() == [
        *map(int, "00111100")
    ]


def test_picture_shows_owners(tmp_path):
    """Rows have their owner's colour below the diagonal, and a pale one above."""
    path = tmp_path / "layout.png"
    mask = parse_mask("causal", 64)
    plot(mask, HeadTail(64, 2), 2, path)
    from matplotlib.image import imread

    image = torch.from_numpy(imread(path).copy())[..., :3]
    colours = {
        tuple(pixel) for pixel in (image[::2, ::2] * 255).round().int().flatten(0, 1).tolist()
    }
    assert {(0x42, 0x69, 0xD0), (0xEF, 0xB1, 0x18), (0xB9, 0xBA, 0xC2)} <= colours
    assert image.shape[0] > 400 and image.shape[1] > 900


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--mask", "documents:37,91,128", "--balancer", "documents", "--world-size", "2"],
        ["--mask", "sliding:512", "--balancer", "blocks", "--world-size", "4"],
        ["--mask", "full", "--balancer", "none", "--seq-len", "10", "--world-size", "12"],
    ],
)
def test_command(arguments, tmp_path, capsys):
    path = tmp_path / "layout.png"
    assert main(["plot", *arguments, "-o", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert said.startswith(f"{path}: imbalance ")
    if not arguments:
        natural = max_over_mean(work_per_rank(parse_mask("causal"), None, 8))
        assert said.endswith(f"imbalance 1.0000, in natural order {natural:.4f}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mask", "zigzag"], "--mask must be causal, full, documents:LENGTH"),
        (["--mask", "causal:3"], "got 'causal:3'"),
        (["--mask", "sliding"], "got 'sliding'"),
        (["--mask", "sliding:x"], "got 'sliding:x'"),
        (["--mask", "sliding:0"], "must be a positive int, got 0"),
        (["--mask", "documents:"], "got 'documents:'"),
        (["--mask", "documents:3,4", "--seq-len", "8"], "are 7 positions long, but --seq-len is 8"),
        (["--balancer", "blocks", "--seq-len", "100"], "100 positions .* --block-size 128"),
        (["--balancer", "blocks", "--seq-len", "384"], "3 blocks of 128 .* 8 ranks"),
        (["--seq-len", "0"], "--seq-len must be a positive int, got 0"),
        (["--world-size", "0"], "--world-size must be a positive int, got 0"),
        (["-o", "layout.nothing"], "layout.nothing: "),
    ],
)
def test_refusals(arguments, message, capsys):
    assert main(["plot", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("cp_dispatch plot: ")
    with pytest.raises(ContextParallelError, match=message):
        raise ContextParallelError(error)


def test_refuses_a_balancer_of_another_length(tmp_path):
    with pytest.raises(
        ContextParallelError, match="is for 8 positions on 2 ranks, but the mask has 16"
    ):
        plot(parse_mask("causal", 16), HeadTail(8, 2), 2, tmp_path / "layout.png")


def test_without_matplotlib(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
