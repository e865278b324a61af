"""Only ``_compat`` uses names that torch marks as private."""

import ast
import pathlib

import cp_dispatch
from cp_dispatch import _compat


def test_all_is_complete():
    """``__all__`` contains what other modules import from _compat, and what it defines."""
    package = pathlib.Path(cp_dispatch.__file__).parent
    imported = {
        alias.name
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "cp_dispatch._compat"
        for alias in node.names
    }
    assert imported == set(_compat.__all__)


def private_names(path: pathlib.Path):
    """Names of torch with a leading underscore that a module imports or accesses."""

    def is_private(name: str) -> bool:
        return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))

    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        # Annotations are never evaluated.
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None:
                setattr(node, field, None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (x.name for x in node.names if x.name.startswith("torch.") and
                        is_private(x.name))  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from filter(is_private, names)
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            # torch.ops contains operators, whose names are not private symbols.
            if text.startswith("torch.") and not text.startswith("torch.ops.") and is_private(text):
                yield text


def test_nothing_else_reaches_into_objects_of_torch():
    """Every private attribute in the package is one that the package sets on its own objects, or
    one of Python's, or ``Tensor._version``."""
    package = pathlib.Path(cp_dispatch.__file__).parent
    trees = {p: ast.parse(p.read_text()) for p in package.rglob("*.py")}
    own = {"_version", "_replace", "_fields", "_getframe", "_DummyThread"}
    reached = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                of = ast.unparse(node.value)
                if of in ("self", "cls"):
                    own.add(node.attr)
                elif path.name != "_compat.py" and of.split(".")[0] not in ("aten", "torch"):
                    reached.append((path.name, node.attr))
    names = [name for name in reached if not name[1].startswith("__")]
    assert not {name for name in names if name[1] not in own}


def test_nothing_else_uses_private_names_of_torch():
    package = pathlib.Path(cp_dispatch.__file__).parent
    found = {str(p.relative_to(package)): list(private_names(p)) for p in package.rglob("*.py")}
    assert found.pop("_compat.py")  # to show that the search finds them
    assert not {path: names for path, names in found.items() if names}
