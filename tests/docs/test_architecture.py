"""docs/architecture.md agrees with the code: modules, imports, classes, functions, constants and drawings."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from markdown_it import MarkdownIt

from tests.docs.drawings import CLUSTER, NODE, PICTURES, Chart, drawings, layers_drawing, layers_of, status_drawing
from tests.docs.reading import CHECKOUT, PAGES, blocks_of
from tfos_nb.driver.cluster_lifecycle import CLUSTER_TRANSITIONS
from tfos_nb.driver.membership.members import TRANSITIONS

TEXT = PAGES["architecture"].read_text(encoding="utf-8")
LINES = [line for block in blocks_of("architecture") for line in block.text.splitlines()]
PACKAGE = "tfos_nb."

WORDS = {"ctx", "evaluate", "fit", "main"}
"""What the page has in lower case and is no module."""
THEIRS = {"DataFrame"}

NAME = r"[a-z_][a-z0-9_]*"
MODULE = re.compile(rf"{NAME}(?:\.{NAME})*")
LINE = re.compile(rf"{MODULE.pattern}(?: (?:->|~>) {MODULE.pattern})+(?P<why> +# \S.*)?")
CLASS = re.compile(rf"(?P<name>[A-Z]\w*[a-z]\w*)(?:\.(?P<member>{NAME})(?:\(\))?)?")
FUNCTION = re.compile(rf"(?P<ctx>ctx\.)?(?P<name>{NAME})\(\)")
CONSTANT = re.compile(r"_?[A-Z][A-Z_]+")


# --- the page


def code_in(text: str) -> list[str]:
    """Return the texts between backticks, outside blocks."""
    inline = (child for token in MarkdownIt("commonmark").parse(text) for child in token.children or ())
    return [child.content for child in inline if child.type == "code_inline"]


def hops(line: str) -> list[tuple[str, str, str]]:
    """Return the pairs of neighbouring modules in a line, each with its arrow: an import, or another connection."""
    modules = re.split(r" ([-~]>) ", line.partition("#")[0].strip())
    return list(zip(modules[:-2:2], modules[1::2], modules[2::2], strict=True))


def modules_in(line: str) -> set[str]:
    return {module for one, _, other in hops(line) for module in (one, other)}


# --- the code


@functools.cache
def code() -> dict[str, ast.Module]:
    """Return all modules and packages, by their names after ``tfos_nb.``."""
    root = CHECKOUT / PACKAGE.rstrip(".")
    files = {file: ".".join(file.relative_to(root).with_suffix("").parts) for file in root.rglob("*.py")}
    return {name.removesuffix(".__init__"): ast.parse(file.read_text("utf-8")) for file, name in files.items()}


@functools.cache
def imported_by(module: str) -> frozenset[str]:
    """Return what a module imports: at its top, within functions, or for type checking only."""
    found: set[str] = set()
    for node in ast.walk(code()[module]):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return frozenset(name.removeprefix(PACKAGE) for name in found if name.startswith(PACKAGE)) & code().keys()


@functools.cache
def members() -> dict[str, set[str]]:
    """Return the methods and attributes of every class, with those of its base classes."""
    own: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for node in itertools.chain.from_iterable(map(ast.walk, code().values())):
        if isinstance(node, ast.ClassDef):
            own[node.name].update(_names_in(node))
            bases[node.name].update(base.id for base in node.bases if isinstance(base, ast.Name))

    def all_of(name: str) -> set[str]:
        return own[name].union(*(all_of(base) for base in bases[name] if base in own and base != name))

    return {name: all_of(name) for name in tuple(own)}


def _names_in(node: ast.AST) -> Iterator[str]:
    """Yield the names that are defined or assigned in a class or a module, at any depth."""
    for one in ast.walk(node):
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield one.name
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            yield one.id
        elif isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
            yield one.attr


@functools.cache
def names() -> frozenset[str]:
    """Return the names that are defined anywhere."""
    return frozenset(itertools.chain.from_iterable(map(_names_in, code().values())))


# --- faults


def missing_modules(text: str) -> list[str]:
    """Return the missing modules that a text names, in blocks or between backticks."""
    blocks = (token.content for token in MarkdownIt("commonmark").parse(text) if token.type == "fence")
    shown = {module for block in blocks for line in block.splitlines() for module in modules_in(line)}
    told = {one for one in code_in(text) if MODULE.fullmatch(one)} - WORDS
    return sorted((shown | told) - code().keys())


def is_imported(one: str, other: str) -> bool:
    return one in code() and other in imported_by(one)


def missing_names(text: str) -> list[str]:
    """Return the missing classes, functions and constants that a text names between backticks."""
    return [one for one in code_in(text) if one not in THEIRS and not _is_there(one)]


def _is_there(one: str) -> bool:
    if found := CLASS.fullmatch(one):
        return found["name"] in members() and found["member"] in {None, *members()[found["name"]]}
    if found := FUNCTION.fullmatch(one):
        return found["name"] in (members()["NodeContext"] if found["ctx"] else names())
    return not CONSTANT.fullmatch(one) or one in names()


# --- the tests


def test_every_module_on_the_page_exists() -> None:
    assert len({one for one in code_in(TEXT) if one in code()}) > 40
    assert missing_modules(TEXT) == []


def test_every_line_of_a_block_is_a_chain_and_explains_steps_without_import() -> None:
    assert len(LINES) > 30
    found = {line: LINE.fullmatch(line) for line in LINES}
    assert [line for line, match in found.items() if not match or ("~>" in line) != bool(match["why"])] == []


@pytest.mark.parametrize(
    ("one", "other"), sorted({(one, other) for line in LINES for one, arrow, other in hops(line) if arrow == "->"})
)
def test_an_import_on_the_page_exists_in_the_code(one: str, other: str) -> None:
    assert is_imported(one, other)


@pytest.mark.parametrize(
    ("one", "other"), sorted({(one, other) for line in LINES for one, arrow, other in hops(line) if arrow == "~>"})
)
def test_a_step_without_import_on_the_page_has_none_in_the_code(one: str, other: str) -> None:
    assert not is_imported(one, other)


def test_each_line_of_a_block_has_a_module_of_a_line_above() -> None:
    for block in blocks_of("architecture"):
        first, *others = block.text.splitlines()
        seen = modules_in(first)
        for line in others:
            assert modules_in(line) & seen, f"{block}: {line}"
            seen |= modules_in(line)


def test_every_class_function_and_constant_on_the_page_exists() -> None:
    assert missing_names(TEXT) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("`driver.roster`", "driver.roster"),
        ("`clusters`", "clusters"),
        ("```text\ndriver.membership -> driver.roster\n```", "driver.roster"),
        ("```text\ndriver.roster ~> driver.membership  # gRPC\n```", "driver.roster"),
    ],
)
def test_a_missing_module_is_detected(text: str, fault: str) -> None:
    assert missing_modules(text) == [fault]


@pytest.mark.parametrize(
    ("one", "other", "there"),
    [
        ("driver.cluster_controller", "driver.feed_controller", True),
        ("driver.cluster_controller", "driver.outcome", False),
        ("driver.roster", "driver.feed_controller", False),
        ("magics.cluster", "cluster", True),  # within a function
        ("cluster_inference", "runtime.inference.serving", True),
        ("runtime.program.tensorflow_cluster", "runtime.program.coordinator_steps", True),  # for type checking only
        ("runtime.feed.transfer", "runtime.control.wire", True),  # from runtime.control import wire
    ],
)
def test_imports_are_found_anywhere_in_a_module(one: str, other: str, there: bool) -> None:
    assert is_imported(one, other) is there


@pytest.mark.parametrize(
    "name", ["Rooster", "Roster.heard()", "ClusterOutcome.sealed", "feed_jobs()", "ctx.datasets()", "HANDED_ON"]
)
def test_a_missing_name_is_detected(name: str) -> None:
    assert missing_names(f"`{name}`") == [name]


@pytest.mark.parametrize(
    ("heading", "table"),
    [("Node status transitions", TRANSITIONS), ("Cluster status transitions", CLUSTER_TRANSITIONS)],
)
def test_the_table_of_statuses_matches_the_code(heading: str, table: Any) -> None:
    made = [f"| {one.value} | {to.value} | {why} |" for one, after in table.items() for to, why in after.items()]
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("| ")] == ["| from | to | when |", *made]


# --- the drawings

PYPROJECT = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")


def with_change(table: Mapping[Any, Mapping[Any, str]], one: Any, to: Any) -> dict[Any, dict[Any, str]]:
    """Return a table without this transition, or with it if the table lacks it."""
    changed = {status: dict(after) for status, after in table.items()}
    if changed[one].pop(to, None) is None:
        changed[one][to] = "for a cause of its own"
    return changed


def test_the_drawings_are_up_to_date() -> None:
    there = {path.name: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}
    assert there.keys() == drawings().keys()
    assert [name for name, drawn in drawings().items() if there[name] != drawn] == [], "run make drawings"


@pytest.mark.parametrize("name", drawings())
def test_the_page_shows_each_drawing_and_describes_it(name: str) -> None:
    assert re.search(rf"!\[.{{40,}}\]\(pictures/{re.escape(name)}\)", TEXT)


@pytest.mark.parametrize(("chart", "table"), [(NODE, TRANSITIONS), (CLUSTER, CLUSTER_TRANSITIONS)])
def test_a_changed_transition_changes_the_drawing(chart: Chart, table: Any) -> None:
    drawn = status_drawing(chart, table)
    for one, to in itertools.permutations(table, 2):
        changed = with_change(table, one, to)
        assert status_drawing(chart, changed) != drawn, f"{one.value} to {to.value}"
        other_cause = with_change(changed, one, to)
        assert (status_drawing(chart, other_cause) == drawn) is (other_cause == table), f"{one.value} to {to.value}"


def test_the_layers_are_read_from_the_contracts() -> None:
    layers = layers_of(PYPROJECT)
    assert layers.keys() == {"tfos_nb", "tfos_nb.runtime"}
    assert layers["tfos_nb"][0] == ["demo", "__main__", "compat"]
    assert "errors" in layers["tfos_nb"][-1]
    assert len(layers["tfos_nb"]) <= 9, "floors"
    assert layers["tfos_nb.runtime"][-2:] == [["host", "storage"], ["control", "code", "rows"]]


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ('    "datasets",\n', ""),
        ('    "host | storage",\n', '    "host | storage | grids",\n'),
        ('    "program",\n    "datasets",\n', '    "datasets",\n    "program",\n'),
    ],
)
def test_a_changed_layer_changes_the_drawing(written: str, instead: str) -> None:
    assert PYPROJECT.count(written) == 1
    assert layers_drawing(PYPROJECT.replace(written, instead)) != layers_drawing(PYPROJECT)
