"""The order of programs in FlexAttention's kernels; the kernels themselves need a GPU."""

import itertools
import re
import types
from collections import Counter

import pytest
import torch

import cp_dispatch
from cp_dispatch.flex import program_order, rule
from cp_dispatch.flex.program_order import OPTION, backward_in_our_order, in_our_order, with_order
from cp_dispatch.flex.rule import BACKWARD, FORWARD
from tests.flex.problems import FlexProblem, gradients_on_cpu
from tests.flex.sharded import run_sharded
from tests.ranks import one_rank

jinja2 = pytest.importorskip("jinja2")
pytest.importorskip("jinja2.meta")

FILES = {
    "forward": (("flex_attention", "utilities", "common"), in_our_order),
    "backward": (("flex_backwards", "utilities"), backward_in_our_order),
}


def sources(kind):
    from torch._inductor.kernel.flex.common import load_flex_template

    files, rewrite = FILES[kind]
    source = "".join(map(load_flex_template, files))
    return source, rewrite(source)


def rendered(source, **options):
    """A template's text with a name in place of everything that inductor would fill in."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["indent_except_first"] = lambda text, _: text
    names = jinja2.meta.find_undeclared_variables(environment.parse(source)) - {OPTION}
    values = {name: lambda *args, **kwargs: "filled" for name in names} | {"USE_TMA": False}
    return environment.from_string(source).render(values | options)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("kind", FILES)
def test_torchs_own_kernels_keep_their_text(kind, full):
    source, ours = sources(kind)
    assert ours != source
    assert rendered(ours, HAS_FULL_BLOCKS=full) == rendered(source, HAS_FULL_BLOCKS=full)
    text = rendered(ours, HAS_FULL_BLOCKS=full, **{OPTION: 1})
    # Only the part that says which program stands for which asks for torch's.
    assert text.count("tl.program_id(") == 3
    assert kind == "forward" or "range(0, cp_heads)" in text


def programs(kind, grid, **names):
    """What every program of a grid computes, in the order in which they start: the block, the batch
    row and the head, from executing our part of the kernel's text."""
    _, ours = sources(kind)
    text = rendered(ours, HAS_FULL_BLOCKS=True, **{OPTION: 1})
    start = text.index("    cp_blocks = tl.num_programs(0)")
    end = re.search(r"^    (q_start|pid) =", text[start:], re.M).start() + start
    code = compile("if True:\n" + text[start:end], kind, "exec")
    found = []
    for at in itertools.product(*(range(size) for size in reversed(grid))):
        x = tuple(reversed(at))
        tl = types.SimpleNamespace(
            program_id=lambda dim, x=x: x[dim], num_programs=lambda dim: grid[dim], int32=None,
            cdiv=lambda a, b: -(-a // b), minimum=min, cast=lambda value, dtype: value,
        )  # fmt: skip
        scope = {"tl": tl, **names}
        exec(code, scope)
        found.append((scope["cp_0"], scope["cp_1"], scope["cp_2"]))
    return found


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("wanted", [1, 20, 10_000])
def test_each_program_runs_once(group, wanted):
    grid = (5, 2, 6)
    found = programs("forward", grid, **{OPTION: wanted, "GQA_SHARED_HEADS": group})
    whole = Counter(itertools.product(*map(range, grid)))
    assert Counter(found) == whole
    keys, rows = 3, 4
    grid = (keys + rows * group, 2, 6)
    names = {OPTION: wanted, "GQA_SHARED_HEADS": group, "KV_LEN": keys * 8 - 3, "BLOCK_N1": 8}
    found = programs("backward", grid, **names)
    assert Counter(found) == Counter(itertools.product(*map(range, grid)))


def test_last_heads_start_together_with_the_last_rows():
    names = {OPTION: 10, "GQA_SHARED_HEADS": 2}
    found = programs("forward", (3, 1, 6), **names)
    assert found[:6] == [(block, 0, head) for head in range(2) for block in range(3)]
    assert found[6:10] == [(2, 0, head) for head in range(2, 6)]
    assert found[-4:] == [(0, 0, head) for head in range(2, 6)]


def test_last_heads_of_a_backward_start_with_the_first_keys():
    names = {OPTION: 12, "GQA_SHARED_HEADS": 2, "KV_LEN": 16, "BLOCK_N1": 8}
    found = programs("backward", (2 + 2 * 3, 1, 3), **names)
    assert found[:8] == [(block, 0, 0) for block in range(8)]
    assert found[8:12] == [(0, 0, 1), (0, 0, 2), (1, 0, 1), (1, 0, 2)]
    # Rows from the last to the first, for both query heads of a key head.
    assert [block for block, _, head in found[12:] if head == 1] == [4, 7, 3, 6, 2, 5]


class Pointer:
    """A pointer of Triton's language, to integers."""

    def __init__(self, values, at=0):
        self.values, self.at = values, at

    def __add__(self, step):
        return Pointer(self.values, self.at + step)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("heads", [1, 4])
def test_keys_without_rows_are_skipped(heads, full):
    """For each block of keys of each key head: whether the loop over query heads has a turn."""
    batch, blocks, group = 2, 3, 2
    counts, full_counts = (torch.zeros(batch, heads, blocks, dtype=torch.int) for _ in range(2))
    counts[1, heads - 1, 2] = 5
    full_counts[0, 0, 1] = 7
    _, ours = sources("backward")
    stride = {"stride": lambda name, *dim: counts.stride(*dim)}
    text = rendered(ours, HAS_FULL_BLOCKS=full, **stride, **{OPTION: 1})
    start = text.index("        cp_heads = 0")
    end = text.index("        for off_g in range(0, cp_heads)")
    code = compile("if True:\n" + text[start:end], "backward", "exec")
    total = counts + full_counts if full else counts
    total = total.expand(batch, 4, blocks).reshape(batch, 4 // group, group, blocks).sum(2)
    for at in itertools.product(range(batch), range(4 // group), range(blocks)):
        row, key_head, block = at
        scope = {
            "tl": types.SimpleNamespace(minimum=min, load=lambda x: int(x.values[x.at])),
            "Q_NUM_BLKS": Pointer(counts.flatten()),
            "FULL_Q_NUM_BLKS": Pointer(full_counts.flatten()),
            "SPARSE_HQ": heads, "GQA_SHARED_HEADS": group, "sparse_idx_z": row,
            "off_hkv": key_head, "pid_mask": block, "stride_q_num_blks_h": counts.stride(1),
        }  # fmt: skip
        exec(code, scope)
        assert scope["cp_heads"] == (group if total[at] else 0), at


@pytest.mark.parametrize(
    "source", ["no program", "a\n  x = tl.program_id(0)\n", "tl.program_id(0) " * 2]
)
def test_an_unknown_backward_is_left_alone(source):
    assert backward_in_our_order(source) is None


def test_the_option_is_for_gpus_that_inductor_compiles_for(monkeypatch):
    cuda, given = torch.device("cuda"), {"BLOCK_M": 64}
    assert with_order(given, cuda) is given  # nothing is compiled
    monkeypatch.setattr(program_order, "compiles_for_inductor", lambda: True)
    processors = types.SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: processors)
    monkeypatch.setattr(program_order, "_templates_know", lambda: True)
    assert with_order(given, cuda) == given | {OPTION: 32}
    assert with_order(given, torch.device("cpu")) is given
    assert with_order({OPTION: 0}, cuda) == {OPTION: 0}
    assert with_order({"BACKEND": "FLASH"}, cuda) == {"BACKEND": "FLASH"}
    monkeypatch.setattr(program_order, "_templates_know", lambda: False)
    assert with_order(given, cuda) is given


def test_both_directions_pass_it_on(monkeypatch):
    given = []

    def kernel(op, place):
        def call(*args):
            given.append(args[place][OPTION])
            return op(*args)

        return call

    monkeypatch.setattr(rule, "FORWARD", kernel(FORWARD, 6))
    monkeypatch.setattr(rule, "BACKWARD", kernel(BACKWARD, 11))
    monkeypatch.setattr(rule, "with_order", lambda options, device: options | {OPTION: device.type})
    with gradients_on_cpu(), one_rank() as mesh, cp_dispatch.enabled():
        run_sharded(FlexProblem("causal", length=64, block=16), mesh)
    assert given == ["cpu", "cpu"]
