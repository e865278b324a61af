"""The extension as a whole: whether it is there, what happens if it is not, and opcheck for every
op."""

from __future__ import annotations

import os
import pathlib
import runpy
import shutil
import subprocess
import sys

import pytest
import setuptools
import torch
from torch.utils.cpp_extension import get_cxx_compiler

import cp_dispatch
from cp_dispatch import extension
from cp_dispatch.native import rows
from cp_dispatch.native.merge_ops import merge_op
from cp_dispatch.native.permute import permute_sequence
from cp_dispatch.native.permute_ops import backward_op, permute_op, sources_of

OPS = ("copy_rows", "sum_rows", "span_indices", "invert_index", "merge_partials")
REPOSITORY = pathlib.Path(cp_dispatch.__file__).parents[1]
DISABLED = os.environ.get("CP_DISPATCH_USE_CPP", "1") == "0"

needs_extension = pytest.mark.skipif(
    not extension.is_loaded(), reason=f"no extension: {extension.why_not_loaded()}"
)


def has_compiler() -> bool:
    return shutil.which(get_cxx_compiler().split()[0]) is not None


@pytest.mark.skipif(DISABLED, reason="CP_DISPATCH_USE_CPP=0")
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_extension_is_loaded_where_there_is_a_compiler():
    assert extension.state().startswith("loaded")
    assert extension.is_loaded(), (
        f"{extension.why_not_loaded()}; build it with "
        "`pip install --no-build-isolation -e .` or `python setup.py build_ext --inplace`"
    )


@needs_extension
@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_kernel(op):
    assert extension.has_kernel(op, "cpu")
    assert not extension.has_kernel(op, "mps")


@pytest.mark.gpu
@pytest.mark.skipif(DISABLED, reason="CP_DISPATCH_USE_CPP=0")
@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_cuda_kernel(op):
    assert extension.has_kernel(op, "cuda")


def python(code: str, **environment) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter, with the lines of the log on stderr."""
    code = (
        "import logging; logging.basicConfig(level='INFO', format='%(name)s|%(message)s')\n" + code
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )


USE = """
import torch
from cp_dispatch import extension
from cp_dispatch.native.merge import merge_partials
from cp_dispatch.native.merge_ops import merge_op
from cp_dispatch.native.permute import inverse_permutation, permute_sequence, span_indices
index = span_indices([(2, 2), (0, 2)])
x = torch.randn(1, 2, 4, 3)
assert torch.equal(permute_sequence([x], index, 2)[0], x[:, :, [2, 3, 0, 1]])
assert torch.equal(inverse_permutation(index), index)
lse = torch.zeros(1, 2, 4)
merge_partials(x, lse, x, lse, x, lse)
print(extension.is_loaded(), extension.why_not_loaded(), sep="|")
"""


def lines_of_log(run: subprocess.CompletedProcess) -> list[str]:
    return [line for line in run.stderr.splitlines() if line.startswith("cp_dispatch|")]


def test_switched_off_by_the_environment():
    run = python(USE, CP_DISPATCH_USE_CPP="0")
    assert run.stdout == "False|CP_DISPATCH_USE_CPP=0\n"
    assert lines_of_log(run) == [
        "cp_dispatch|cp_dispatch runs without its C++ extension: CP_DISPATCH_USE_CPP=0"
    ]


@pytest.mark.parametrize("rank, lines", [("0", 1), ("1", 0)])
def test_one_line_a_host(rank, lines):
    run = python("import cp_dispatch", CP_DISPATCH_USE_CPP="0", LOCAL_RANK=rank)
    assert len(lines_of_log(run)) == lines


def test_not_built():
    run = python(
        "import sys; sys.modules['cp_dispatch._C'] = None\n" + USE, CP_DISPATCH_USE_CPP="1"
    )
    assert run.stdout.startswith("False|it is not built")
    assert len(lines_of_log(run)) == 1


def test_built_for_something_else(monkeypatch, caplog):
    """One line with what is required and what was found."""

    def fails(name):
        raise ImportError("undefined symbol: torch_parallel_for")

    monkeypatch.delenv("CP_DISPATCH_USE_CPP", raising=False)
    monkeypatch.setattr(extension.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(extension.importlib, "import_module", fails)
    reason = extension._load()
    extension._report("C++ extension", reason)
    for part in ("needs torch >= 2.10", f"found torch {torch.__version__}", "undefined symbol"):
        assert part in reason
    assert [r.getMessage() for r in caplog.records if r.name == "cp_dispatch"] == [
        f"cp_dispatch runs without its C++ extension: {reason}"
    ]


def test_missing_cuda_kernels_are_mentioned_once_and_only_with_a_gpu(monkeypatch, caplog):
    monkeypatch.setattr(extension, "_cuda_reason", "they are not built")
    extension.has_kernel.cache_clear()
    extension._mention_cuda.cache_clear()
    try:
        for device, lines in (("cpu", 0), ("cuda", 1), ("cuda", 1)):
            for op in OPS:
                extension.has_kernel(op, device)
            assert len([r for r in caplog.records if r.name == "cp_dispatch"]) == lines
    finally:
        extension._mention_cuda.cache_clear()


@needs_extension
def test_loaded_in_silence():
    run = python(USE, CP_DISPATCH_USE_CPP="1")
    assert run.stdout.startswith("True|") and not lines_of_log(run)


# opcheck: schema, fake, autograd registration, and all of it under AOT dispatch.


def merge_arguments():
    out_a, out_b, out = torch.randn(3, 1, 2, 3, 4).unbind(0)
    lse_a, lse_b, lse = torch.randn(3, 1, 2, 3).unbind(0)
    return out_a, lse_a, out_b, lse_b, out, lse


def copy_arguments(index, scatter):
    k, v = torch.randn(2, 3, 4, 5), torch.randn(2, 4, 3, 2).transpose(1, 2)
    targets = [torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 2)]
    return targets, [k, v], index, [2, 2], scatter


def sum_arguments(index):
    k, v = torch.randn(2, 3, 5), torch.randn(2, 3, 2, 3).bfloat16().transpose(1, 3)
    targets = [torch.zeros(2, 4, 5), torch.zeros(2, 3, 2, 4, dtype=torch.bfloat16)]
    return targets, [k, v], *sources_of(torch.tensor(index), 4), [1, 3]


INDEX = torch.tensor([3, -1, 0, 1])
CALLS = {
    "copy, gather": (rows.copy_rows, copy_arguments(INDEX, False)),
    "copy, scatter": (rows.copy_rows, copy_arguments(INDEX, True)),
    "copy, per batch row": (
        rows.copy_rows, copy_arguments(torch.stack([INDEX, INDEX.flip(0)]).int(), False)
    ),
    "copy, no index": (rows.copy_rows, copy_arguments(None, False)),
    "sum": (rows.sum_rows, sum_arguments([0, 2, 2])),
    "sum, per batch row": (rows.sum_rows, sum_arguments([[0, 2, 2], [1, -1, 0]])),
    "spans": (rows.span_indices, (torch.tensor([[4, 2], [0, 3]]), 5)),
    "inverse": (rows.invert_index, (torch.tensor([[1, 0, -1]]), 4)),
    "merge in place": (torch.ops.cp_dispatch.merge_partials.default, merge_arguments()),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_opcheck(call):
    op, arguments = CALLS[call]
    torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_permute(unique, requires_grad):
    x = torch.randn(2, 3, 4, 5, requires_grad=requires_grad)
    y = torch.randn(2, 4, 3, 2).transpose(1, 2).requires_grad_(requires_grad)
    index = torch.tensor([[3, -1, 0], [1, 2, 0]])
    torch.library.opcheck(permute_op, ([x, y], index, [2, 2], True, unique))
    torch.library.opcheck(backward_op, ([x, y], INDEX, [2, 2], [6, 4], unique))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_opcheck_merge(requires_grad, dtype):
    arguments = [x.clone().requires_grad_(requires_grad) for x in merge_arguments()[:4]]
    torch.library.opcheck(merge_op, (*arguments, dtype))


def test_permute_in_a_compiled_graph():
    """One node of the graph, forward and backward, without a graph break."""
    x = torch.randn(2, 3, 8, 4, requires_grad=True)
    index = torch.tensor([3, 1, -1, 1])

    def function(x):
        return permute_sequence([x * 2], index, 2, checked=True)[0].sin()

    expected = function(x)
    expected.sum().backward()
    grad, x.grad = x.grad, None
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    out = compiled(x)
    out.sum().backward()
    assert torch.equal(out, expected) and torch.equal(x.grad, grad)


@pytest.mark.skipif(not extension.is_loaded(), reason="no extension")
def test_cuda_kernels_of_an_older_build_are_mentioned(monkeypatch, caplog):
    """Without the op that was added last, copy engines are off. That is slower, and otherwise would
    not be noticed."""
    registered = set()
    monkeypatch.setattr(extension, "_cuda_reason", "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(extension, "kernel_is_registered", lambda op, key: op in registered)
    extension._mention_cuda.cache_clear()
    try:
        extension._mention_cuda()
        assert "older than the package" in caplog.messages[0]
        assert "install cp_dispatch again" in extension.state() and extension.why_not_loaded()
        registered.add(f"cp_dispatch::{extension.NEWEST_CUDA_KERNEL}")
        assert extension.state() == "loaded" and not extension.why_not_loaded()
    finally:
        extension._mention_cuda.cache_clear()


def test_a_switch_is_off_by_a_word_too(monkeypatch):
    for value, on in {"false": False, "No": False, "": True, "1": True}.items():
        monkeypatch.setenv("CP_DISPATCH_USE_CPP", value)
        assert (extension._load() != "CP_DISPATCH_USE_CPP=0") is on


@pytest.mark.parametrize("word", ["0", "off", "False"])
def test_nothing_is_built_by_any_word_for_it(monkeypatch, capsys, word):
    monkeypatch.setenv("CP_DISPATCH_BUILD_EXT", word)
    options = options_of_setup(monkeypatch)
    assert "ext_modules" not in options
    assert f"CP_DISPATCH_BUILD_EXT={word}" in capsys.readouterr().out


def options_of_setup(monkeypatch) -> dict:
    """What setup.py passes to setuptools."""
    given = []
    monkeypatch.setattr("setuptools.setup", lambda **options: given.append(options))
    runpy.run_path(str(pathlib.Path(__file__).parents[1] / "setup.py"))
    (options,) = given
    return options


def test_a_wheel_has_nothing_of_earlier_builds(monkeypatch, tmp_path):
    monkeypatch.setenv("CP_DISPATCH_BUILD_EXT", "0")
    source, built = tmp_path / "source", tmp_path / "build"
    for folder in (source / "cp_dispatch", built / "cp_dispatch"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    stale = built / "cp_dispatch" / "moved.py"
    stale.touch()
    monkeypatch.chdir(source)
    options = options_of_setup(monkeypatch)
    options |= {"packages": ["cp_dispatch"], "script_name": "setup.py"}
    build = setuptools.Distribution(options)
    command = build.get_command_obj("build_py")
    command.build_lib = str(built)
    command.ensure_finalized()
    command.run()
    assert [path.name for path in stale.parent.glob("*.py")] == ["__init__.py"]
