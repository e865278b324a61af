"""The documentation's pages: their links, and the tables that are generated from stored results."""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
import textwrap
import typing

import pytest

import cp_dispatch
from tests.tools.scripts import load

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted(
    page
    for folder in (".", "cp_dispatch", "cp_dispatch/docs", "csrc", "tools/results")
    for page in (ROOT / folder).glob("*.md")
)


def prose(page: pathlib.Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors that GitHub generates from headings."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
        if found[name]:
            found[f"{name}-{found[name]}"] = 0
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_valid_and_uses_public_names(page):
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    for node in (x for block in blocks for x in ast.walk(ast.parse(textwrap.dedent(block)))):
        if isinstance(node, ast.ImportFrom) and node.module == "cp_dispatch":
            assert {alias.name for alias in node.names} <= set(cp_dispatch.__all__)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "cp_dispatch":
            assert node.attr in cp_dispatch.__all__


def test_every_page_is_linked_from_the_readme():
    text = (ROOT / "README.md").read_text()
    docs = [str(p.relative_to(ROOT)) for p in PAGES if p.parent.name == "docs"]
    assert len(docs) > 5
    assert [name for name in docs if f"({name}" not in text] == []


@pytest.mark.parametrize("name", cp_dispatch.__all__)
def test_public_names_are_listed_with_their_parameters(name):
    text = (ROOT / "cp_dispatch" / "docs" / "api.md").read_text()
    public = getattr(cp_dispatch, name)
    if name.endswith(("Plan", "Error")):  # not called by users
        assert f"`{name}`" in text
        return
    parameters = inspect.signature(public).parameters.values()
    plain = inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters])
    assert f"`{name}{plain}`" in text


def test_tables_are_those_of_the_kept_results():
    bench = load("bench_table")
    for page in bench.PAGES:
        assert bench.filled(page.read_text()) == page.read_text(), "run tools/bench_table.py"


def test_a_table_is_of_one_machine_and_day():
    bench = load("bench_table")
    one, other = ({"card": card, "rows": [card]} for card in ("a", "b"))
    assert bench.joined([one, one])["rows"] == ["a", "a"]
    with pytest.raises(ValueError, match="one table"):
        bench.joined([one, other])


@pytest.mark.parametrize(
    ("name", "ran", "words"),
    [
        ("cp_dispatch ulysses", "ring", " (ring)"),
        ("cp_dispatch one call, head-tail", "one_call", ""),
        ("cp_dispatch gather", "mirrored_gather", ""),
        ("cp_dispatch natural_ring", "ring", ""),
        ("cp_dispatch auto, head-tail", "ring", ""),
        ("torch cp allgather", None, ""),
    ],
)
def test_a_table_says_if_another_schedule_ran(name, ran, words):
    assert load("bench_table")._instead({"implementation": name, "schedule": ran}) == words


@pytest.mark.parametrize("name", cp_dispatch.__all__)
def test_public_names_are_typed(name):
    """The package says so (``py.typed``), so that checkers trust it."""
    public = getattr(cp_dispatch, name)
    if name.endswith("Error"):
        return
    called = public.__init__ if inspect.isclass(public) else public
    parameters = [x for x in inspect.signature(called).parameters if x != "self"]
    wanted = {*parameters, *([] if inspect.isclass(public) else ["return"])}
    assert wanted <= set(typing.get_type_hints(called))
