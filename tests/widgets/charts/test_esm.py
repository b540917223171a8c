"""A widget's script is one text: its parts are joined, each once, and they define no name twice."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tfos_nb.widgets.charts.esm import joined


def test_the_panels_script_is_one_module() -> None:
    text = joined("panel.js")
    assert not re.search(r"^import ", text, re.MULTILINE)
    assert re.findall(r"^export .*", text, re.MULTILINE)[-1] == "export default { initialize, render };"
    for once in ("class Chart ", "class Plot ", "class Panel ", "function put("):
        assert text.count(once) == 1
    assert (
        text.index("function put(")
        < text.index("class Plot ")
        < text.index("class Chart ")
        < text.index("class Panel ")
    )


def test_the_script_of_runs_has_the_shared_parts_but_not_the_panel() -> None:
    text = joined("runs.js")
    assert not re.search(r"^import ", text, re.MULTILINE)
    for once in ("class Chart ", "class Keeper ", "class RunsPage "):
        assert text.count(once) == 1
    assert "class Panel " not in text


@pytest.mark.parametrize("script", ["panel.js", "runs.js"])
def test_no_name_is_defined_twice(script: str) -> None:
    given = re.findall(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", joined(script), re.MULTILINE)
    assert [name for name, times in Counter(given).items() if times > 1] == []


def test_a_file_without_imports_is_unchanged() -> None:
    assert joined("panel.css").startswith("/* The look of the panel")
