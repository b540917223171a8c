import linecache
import pickle
import traceback

import pytest

from tfos_nb.errors import PlanError
from tfos_nb.magics.cell import CellSyntaxError, parse_cell
from tfos_nb.runtime.code.payload import pack


def choose(shell, text, fn=None):
    return parse_cell(shell, text, fn).run()


def refused(shell, text, fn=None):
    with pytest.raises(PlanError) as caught:
        parse_cell(shell, text, fn)
    return str(caught.value)


def test_the_function_with_args_and_ctx_is_chosen(shell):
    program = choose(shell, "def build():\n    return 3\ndef main(args, ctx):\n    return build()\n")
    assert program.function(None, None) == 3
    assert program.note == ""


def test_the_last_suitable_function_is_chosen_and_reported(shell):
    program = choose(shell, "def build(args, ctx): return 1\ndef train(args, ctx): return 2\ndef score(x): return 3\n")
    assert program.function(None, None) == 2
    assert program.note == "runs train, the last of build, train"


def test_two_parameters_of_other_names_suffice_without_a_better_function(shell):
    assert choose(shell, "def main(options, context): return 5\n").function(0, 0) == 5
    program = choose(shell, "def main(args, ctx): return 1\ndef scale(x, y): return 2\n")
    assert (program.function.__name__, program.note) == ("main", "")


def test_optional_parameters_do_not_count(shell):
    assert choose(shell, "def main(args, ctx, depth=3, *, wide=False): return depth\n").function(0, 0) == 3


def test_a_cell_without_a_function_says_what_to_write(shell):
    assert refused(shell, "x = 1\n") == (
        "the cell has no function for the nodes: write def main(args, ctx): or name one with --fn"
    )


def test_unsuitable_functions_are_named_with_their_signatures(shell):
    text = "def build(): pass\ndef fit(x, *, y): pass\nasync def main(args, ctx): pass\nclass A:\n  def m(a, b): pass\n"
    assert refused(shell, text) == (
        "no function of the cell takes (args, ctx): build(), fit(x, *, y), async main(args, ctx). "
        "Write def main(args, ctx): or name one with --fn"
    )


def test_fn_names_a_function_inside_or_outside_the_cell(shell):
    shell.run_cell("def outside(args, ctx): return 7")
    text = (
        "from functools import partial\ndef a(args, ctx): return 1\ndef b(n, args, ctx): return n\nc = partial(b, 4)\n"
    )
    assert choose(shell, text, "a").function(0, 0) == 1
    assert choose(shell, text, "c").function(0, 0) == 4
    assert choose(shell, "", "outside").function(0, 0) == 7


def test_a_wrong_fn_is_refused_with_a_suggestion(shell):
    shell.run_cell("size = 3\ndef narrow(args): pass")
    text = "def train(args, ctx): pass\ndef build(): pass\n"
    assert refused(shell, text, "trian") == "--fn trian: no such function; did you mean train?"
    assert refused(shell, text, "nope") == "--fn nope: no such function; the cell has train, build"
    assert refused(shell, text, "build") == "--fn build: it must take (args, ctx), got build()"
    assert refused(shell, text, "size") == "--fn size: not a function but of type int"
    assert refused(shell, text, "narrow") == "--fn narrow: it must take (args, ctx), got narrow(args)"


def test_nothing_runs_before_the_function_is_found(shell):
    refused(shell, "ran = True\n")
    assert "ran" not in shell.user_ns


def test_the_cell_runs_in_the_users_namespace_with_ipythons_syntax(shell):
    shell.user_ns["n"] = 4
    program = choose(shell, "here = !echo $n\nlimit = n + 1\ndef main(args, ctx): return limit\n")
    assert program.function(0, 0) == 5
    assert shell.user_ns["here"] == ["4"]


def test_future_imports_of_earlier_cells_apply(shell):
    shell.run_cell("from __future__ import annotations")
    assert choose(shell, "def main(args: Unknown, ctx): return 1\n").function(0, 0) == 1


def test_a_traceback_shows_the_users_line_with_its_number_in_the_cell(shell):
    # the magic's line is line 1 of the cell, and line 2 is blank
    program = choose(shell, "\ndef main(args, ctx):\n    rows = 3\n    raise ValueError('label')\n")
    with pytest.raises(ValueError, match="label") as caught:
        program.function(0, 0)
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.lineno, frame.line) == (5, "raise ValueError('label')")
    assert frame.filename.startswith("Cell In[")


def test_the_sources_sent_are_the_cells_and_those_of_cells_it_calls(shell):
    shell.run_cell("def other(): return 1")
    shell.run_cell("def unused(): return 1")
    shell.run_cell("class Model:\n    def build(self): return other()")
    program = choose(
        shell, "import json\ndef main(args, ctx):\n    return [Model().build() for _ in json.loads('[1]')]\n"
    )
    found = pickle.loads(pack(program.function, None))[1].files
    texts = list(found.values())
    assert found[program.function.__code__.co_filename].splitlines()[2].startswith("def main")
    assert any("def other" in text for text in texts)
    assert any("def build" in text for text in texts)
    assert not any("unused" in text for text in texts)
    assert len(texts) == 3
    for name, text in found.items():
        assert "".join(linecache.getlines(name)) == text


def test_invalid_python_is_shown_as_ipythons_syntax_error(shell):
    with pytest.raises(CellSyntaxError) as caught:
        parse_cell(shell, "def main(args, ctx)\n    pass\n")
    shown = "\n".join(caught.value._render_traceback_())
    assert "def main(args, ctx)" in shown
    assert "SyntaxError: expected ':'" in shown
    assert "line 2" in shown
