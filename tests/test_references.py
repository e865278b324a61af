"""References in docstrings and comments of the package name something that exists."""

import importlib
import inspect
import pathlib
import pydoc
import re

import cp_dispatch

ROOT = pathlib.Path(cp_dispatch.__file__).parents[1]
REFERENCE = re.compile(r":(?:mod|func|class|data|meth|attr|exc):`~?([^`]*)`")


def exists(name: str, module: str) -> bool:
    """Whether a name is known in full, beside a module, in it, or in one of its classes."""
    package = module.rpartition(".")[0]
    if any(pydoc.locate(x) for x in (name, f"{package}.{name}")):
        return True
    here = importlib.import_module(module)
    owner, _, last = name.rpartition(".")
    classes = [x for x in vars(here).values() if inspect.isclass(x)]
    if owner:
        classes = [x for x in classes if x.__name__ == owner]
    elif hasattr(here, name):
        return True
    return any(hasattr(x, last) or last in attributes(x) for x in classes)


def attributes(cls: type) -> set[str]:
    """Names that instances have and the class does not."""
    own = [x for x in cls.__mro__ if x.__module__.startswith("cp_dispatch.")]
    found = {name for x in own for name in re.findall(r"\bself\.(\w+)", inspect.getsource(x))}
    return found.union(*(x.__annotations__ for x in own))


def test_references_lead_somewhere():
    lost = []
    for path in sorted(ROOT.glob("cp_dispatch/**/*.py")):
        names = set(REFERENCE.findall(path.read_text()))
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        lost += [(module, name) for name in sorted(names) if not exists(name, module)]
    assert lost == []
