"""Dependencies: which modules may import which, and which constructs are allowed where."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

import cp_dispatch
from cp_dispatch.backends import BACKENDS
from cp_dispatch.planning.collectives import GATHERS, RINGS
from cp_dispatch.schedules import SCHEDULES

PACKAGE = pathlib.Path(cp_dispatch.__file__).parent
#: shard() of a block mask, which no module below a plan calls.
UPWARD = {("layouts.buffers", "flex.create")}
TREES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text())
    for path in PACKAGE.rglob("*.py")
}


def test_the_map_names_every_module_and_folder():
    text = (PACKAGE / "README.md").read_text()
    names = [p.name for p in PACKAGE.glob("*.py") if p.name != "__init__.py"]
    names += [f"{p.parent.name}/" for p in PACKAGE.glob("*/__init__.py")]
    assert [name for name in names if name not in text] == []


def imports(module: str) -> Iterator[tuple[str, str]]:
    """The modules that one module imports, and names from them, wherever the import is."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


def imported(module: str) -> set[str]:
    """The package's modules that one module imports. If it imports names of the package itself, all
    that the package imports."""
    found = set()
    for source, name in imports(module):
        if source.split(".")[0] != "cp_dispatch":
            continue
        inner = source.partition(".")[2]
        candidates = f"{inner}.{name}".strip("."), inner, f"{inner}.__init__".strip(".")
        found.update([next(known for known in candidates if known in TREES)])
    return {name for name in found if (module, name) not in UPWARD}


def known_to(*modules: str) -> set[str]:
    """The modules that these import, and those that they import in turn, and so on."""
    found, new = set(), set(modules)
    while new:
        found |= new
        new = set().union(*map(imported, new)) - found
    return found


def test_importing_the_package_imports_all_of_it():
    """Modules register the ops that they define. Only the command line imports the rest."""
    rest = {name for name in set(TREES) - known_to("__init__") if not name.endswith("__init__")}
    assert rest == {"__main__", "costs.calibrate", "costs.clock", "costs.floors", "plot"}


def within(*packages: str) -> list[str]:
    return [name for name in TREES if name.split(".")[0] in packages]


def test_the_search_finds_imports():
    assert {"flex.rule", "flex.ops", "ops", "layouts.__init__"} <= known_to("flex.install")
    assert len(within("schedules", "backends")) > 30


@pytest.mark.parametrize(("feature", "other"), [("flex", "varlen"), ("varlen", "flex")])
def test_flex_attention_and_varlen_attn_do_not_know_each_other(feature, other):
    found = {m: imported(m) & set(within(other)) for m in within(feature)}
    assert not {module: names for module, names in found.items() if names}


def test_what_both_share_knows_neither():
    assert not known_to(*within("by_need")) & set(within("flex", "varlen"))


def test_a_schedule_names_no_backend():
    names = set(BACKENDS)
    for module in within("schedules"):
        assert not imported(module) & {f"backends.{name}" for name in names}, module
        texts = {n.value for n in ast.walk(TREES[module]) if isinstance(n, ast.Constant)}
        assert not texts & names, module


def test_what_chooses_a_kernel_knows_it_by_its_properties():
    """Otherwise a new kernel would have to be named there. "math", which supports everything, is
    the fallback."""
    choosing = [f"planning.{name}" for name in ("choose", "why_not", "settle", "planner")]
    for module in (*choosing, "costs.calibrate"):
        texts = {n.value for n in ast.walk(TREES[module]) if isinstance(n, ast.Constant)}
        assert not texts & set(BACKENDS) - ({"math"} if module == choosing[0] else set()), module


def test_a_schedule_tells_its_costs():
    """Otherwise :mod:`cp_dispatch.planning.collectives` would report those of a ring."""
    known = {*RINGS, *GATHERS, "replicated_keys", "replicated_queries"}
    told = {name: x for name, x in SCHEDULES.items() if name not in known and ":" not in name}
    assert {"one_call", "ulysses"} <= set(told)
    for name, schedule in told.items():
        assert all(hasattr(schedule, x) for x in ("transfers", "extra_bytes", "blocks")), name


def test_the_extensions_ops_know_nothing_above_them():
    below = {"_compat", "errors", "extension", "switches"}
    assert known_to(*within("native")) <= {*within("native"), *below}


def test_a_backend_does_not_communicate():
    # _compat imports torch.distributed, but a backend uses nothing of it.
    modules = known_to(*within("backends")) - set(within("_compat"))
    assert not modules & {"groups", *within("schedules")}
    for module in modules:
        sources = {f"{source}.{name}" for source, name in imports(module)}
        assert not {s for s in sources if s.startswith("torch.distributed")}, module


def test_nothing_below_the_plan_reads_options():
    """What ops do depends on their arguments: a backward may run when the options have changed."""
    ops = [name for name in TREES if name.split(".")[-1] in ("ops", "group_ops")]
    assert len(ops) == 5
    above = {"options", "toggle", "planning.decide", "planning.settle"}
    assert above < set(TREES) and not known_to(*ops, *within("schedules")) & above


def test_autograd_and_fakes_live_in_ops():
    """The exceptions: helper ops that write in place are next to their twins, the fast path
    replaces an op's autograd, and moving whole tensors is differentiable."""
    beside = {"native.merge", "native.parts", "native.rows", "fast_path", "layouts.buffers"}
    found = {
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.")
        if ast.unparse(node) in ("torch.autograd.Function", "torch.library.register_fake")
    }
    assert {"ops", "fast_path"} <= found
    assert {module for module in found if not module.endswith("ops")} == beside
