import pytest
from IPython.core.completer import provisionalcompleter

import tfos_nb.magics
from tests.magics.conftest import Rows
from tests.magics.test_cluster import MAIN
from tfos_nb.detached.places import DetachedPlace, publish
from tfos_nb.records.run import this_process


@pytest.fixture
def offered(shell):
    """Complete a text as a front-end does; return the completions, and the text that they replace."""

    def complete(text, cursor=None):
        cursor = len(text) if cursor is None else cursor
        with provisionalcompleter():
            found = list(shell.Completer.completions(text, cursor))
        replaced = {text[one.start : one.end] for one in found}
        assert len(replaced) <= 1
        return [one.text for one in found], (replaced.pop() if replaced else "")

    return complete


def test_only_the_options_are_offered_and_no_python_names(offered):
    assert offered("%%tfos_cluster mnist --work") == (["--workers"], "--work")
    words, replaced = offered("%%tfos_cluster mnist --")
    assert replaced == "--"
    assert {"--workers", "--data", "--tensorboard", "--grace"} <= set(words)
    assert all(word.startswith("--") for word in words)


def test_an_option_already_on_the_line_is_not_offered_again(offered):
    words, _ = offered("%%tfos_cluster mnist --workers 2 --env A=1 --w")
    assert words == ["--wait"]
    assert "--env" in offered("%%tfos_cluster mnist --env A=1 --e")[0]


def test_dataframes_are_offered_after_data_and_as_the_first_word(offered, shell):
    shell.user_ns.update(test_df=Rows(), table=[1], _hidden=Rows())
    assert offered("%%tfos_cluster mnist --data ") == (["test_df", "train_df"], "")
    assert offered("%%tfos_cluster mnist --data tr") == (["train_df"], "tr")
    assert offered("%%tfos_cluster mnist --data=te") == (["test_df"], "te")
    assert offered("%tfos_train te") == (["test_df"], "te")
    assert offered("%tfos_inference tr") == (["train_df"], "tr")


def test_without_a_match_the_text_stays_and_no_python_names_are_offered(offered, shell):
    del shell.user_ns["train_df"]
    assert offered("%%tfos_cluster mnist --data ") == ([""], "")
    assert offered("%%tfos_cluster mnist --data a") == (["a"], "a")
    assert offered("%tfos_status i") == (["i"], "i")
    assert offered("%%tfos_cluster mnist --nothing") == (["--nothing"], "--nothing")


def test_with_many_variables_only_our_matcher_is_called(offered, shell, monkeypatch):
    shell.user_ns.update({f"var_{number}": number for number in range(20_000)})
    for slow in ("_jedi_matches", "python_matches", "all_completions"):
        if hasattr(shell.Completer, slow):
            monkeypatch.setattr(shell.Completer, slow, lambda *_, **__: pytest.fail("IPython's own were asked"))
    assert offered("%%tfos_cluster mnist --data va") == (["va"], "va")
    assert offered("%%tfos_cluster mnist --args var_1999") == ([f"var_1999{n}" for n in ("", *range(10))], "var_1999")


def test_choices_functions_and_variables_are_offered_after_their_options(offered, shell):
    shell.run_cell("def outside(args, ctx): pass\nimport math\noptions = {}\nlimit = 3")
    assert offered("%%tfos_cluster mnist --input ") == (["spark", "tensorflow"], "")
    text = "%%tfos_cluster mnist --fn \ndef main(args, ctx):\n    def inner(): pass\n"
    assert offered(text, text.index("\n"))[0] == ["main", "outside"]
    assert offered("%%tfos_cluster mnist --args ")[0] == ["limit", "options"]


def test_with_detach_functions_are_offered_as_rows(offered, shell):
    shell.user_ns["rows"] = lambda spark: spark.range(3)
    assert "rows" in offered("%%tfos_cluster mnist --detach --data ")[0]
    assert "rows" not in offered("%%tfos_cluster mnist --data ")[0]


def test_detached_clusters_are_offered(offered, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    process = this_process()
    publish(DetachedPlace("abcdef000001", "night", process, "0", "/nowhere", 1e9))
    assert offered("%tfos_attach ")[0] == ["night"]


def test_clusters_and_nodes_are_offered(offered, run, launcher):
    run(f"%%tfos_cluster mnist --workers 2 --ps 1\n{MAIN}")
    for magic in ("%tfos_stop", "%tfos_status", "%tfos_panel", "%tfos_tensorboard", "%tfos_plan"):
        assert "mnist" in offered(f"{magic} ")[0]
        assert offered(f"{magic} mn") == (["mnist"], "mn")
    assert offered("%tfos_logs ")[0][:4] == ["chief:0", "worker:0", "worker:1", "ps:0"]
    assert offered("%tfos_logs worker:") == (["worker:0", "worker:1"], "worker:")
    assert "mnist" in offered("%tfos_logs worker:1 ")[0]
    assert offered("%tfos_train train_df m") == (["mnist"], "m")
    assert offered("%tfos_train --epochs 2 tr") == (["train_df"], "tr")
    launcher.last.stop()


def test_a_line_magic_is_completed_inside_a_cell_and_without_percent_sign(offered):
    text = "x = 1\n%tfos_stop --n\ny = 2"
    assert offered(text, text.index("--n") + 3) == (["--now"], "--n")
    assert offered("tfos_stop --n") == (["--now"], "--n")


def test_file_options_are_completed_by_ipython(offered, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert "models/" in offered("%%tfos_cluster mnist --model-dir mod")[0]
    assert "models/" in offered("%tfos_tensorboard --logdir mod")[0]


def test_the_lines_of_the_cell_are_completed_as_python(offered, shell):
    shell.user_ns["something"] = 1
    text = "%%tfos_cluster mnist\nsomethi"
    assert "something" in offered(text)[0]


def test_attributes_of_arbitrary_objects_are_not_read(offered, shell):
    class Greedy:
        def __getattr__(self, name):
            raise RuntimeError(f"{name} would start a job")

    shell.user_ns["greedy"] = Greedy()
    assert offered("%%tfos_cluster mnist --data ")[0] == ["train_df"]
    assert "greedy" in offered("%%tfos_cluster mnist --args ")[0]


def test_without_the_extension_no_options_are_offered(offered, shell):
    tfos_nb.magics.unload(shell)
    assert "--workers" not in offered("%%tfos_cluster mnist --work")[0]


def test_directories_are_completed_by_ipython(offered, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tfos_models").mkdir()
    assert "tfos_models/" in offered("%tfos_runs tfos_m")[0]
