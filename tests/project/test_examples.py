"""The examples in docstrings run, in all modules, and those that are skipped are at least valid Python."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import pytest

import tfos_nb

ROOT = Path(tfos_nb.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name: str) -> None:
    module = importlib.import_module(name.removesuffix(".__init__"))
    cases = doctest.DocTestFinder().find(module)
    examples = [example for case in cases for example in case.examples]
    assert examples, f"{name} has examples"
    for example in examples:
        ast.parse(example.source)
    assert [case.name for case in cases if doctest.DocTestRunner().run(case).failed] == []
