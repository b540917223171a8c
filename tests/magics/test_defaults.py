import inspect

import pytest
from traitlets.config import Config

import tfos_nb.magics
from tests.magics.test_cluster import MAIN
from tfos_nb import launch
from tfos_nb.magics.cluster import TfosMagics
from tfos_nb.magics.defaults import Defaults
from tfos_nb.widgets.live import NoScreen


def test_the_line_overrides_config_and_config_the_defaults(run, launcher):
    run("%config TfosMagics.workers = 3")
    run("%config TfosMagics.model_dir = 's3://b/m'")
    run("%config TfosMagics.timeout = 30")
    run(f"%%tfos_cluster one --input tensorflow\n{MAIN}")
    assert launcher.last.plan.workers == 3
    assert launcher.last.options["model_dir"] == "s3://b/m"
    assert launcher.last.options["rendezvous_timeout"] == 30
    run(f"%%tfos_cluster two --input tensorflow --workers 2 --model-dir here\n{MAIN}")
    assert launcher.last.plan.workers == 2
    assert launcher.last.options["model_dir"] == "here"


def test_wait_on_the_line_overrides_background_in_config(run, launcher):
    run("%config TfosMagics.background = True")
    _, shown = run(f"%%tfos_cluster mnist --data train_df --wait\n{MAIN}")
    assert "runs in the background" not in shown
    assert launcher.last.calls[-1] == "wait"


def test_grace_0_in_config_is_passed_and_its_default_is_launchs(run, launcher, shell):
    run("%config TfosMagics.grace = 0")
    run(f"%%tfos_cluster mnist --input tensorflow\n{MAIN}")
    assert launcher.last.options["grace"] == 0.0
    assert Defaults.class_traits()["grace"].default() == inspect.signature(launch).parameters["grace"].default


def test_without_config_launch_gets_no_extra_options(run, launcher):
    run(f"%%tfos_cluster mnist --input tensorflow\n{MAIN}")
    assert set(launcher.last.options) == set()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("workers = 'two'", "'workers' trait of a TfosMagics instance expected an int"),
        ("workers = -1", "'workers' trait of a TfosMagics instance should not be less than 0"),
        ("height = 3", "should not be less than 100"),
        ("timeout = float('nan')", "TfosMagics.timeout=nan: must be a number of seconds, at most"),
        ("feed_timeout = float('inf')", "TfosMagics.feed_timeout=inf: must be a number of seconds, at most"),
        ("grace = 1e300", "TfosMagics.grace=1e+300: must be a number of seconds, at most"),
        ("progress = 'loud'", "'progress' trait of a TfosMagics instance expected any of"),
        ("proxy_url = '/proxy/8888/'", "TfosMagics.proxy_url must contain %PORT% in place of the port"),
        ("worker = 2", "Did you mean `workers`?"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_and_changes_nothing(shell, capsys, caplog, line, told):
    magics = next(one for one in shell.configurables if isinstance(one, TfosMagics))
    before = magics.trait_values(config=True)
    shell.run_cell(f"%config TfosMagics.{line}")
    said = caplog.text.strip() + capsys.readouterr().out
    assert told in said
    assert "Traceback" not in said
    assert magics.trait_values(config=True) == before
    shell.run_cell("%config TfosMagics.workers = 2")
    assert magics.workers == 2


def test_every_trait_has_a_help(shell, capsys):
    shell.run_cell("%config TfosMagics")
    shown = capsys.readouterr().out
    for name, trait in TfosMagics.class_traits(config=True).items():
        assert f"TfosMagics.{name}=" in shown
        assert trait.help


def test_the_profiles_configuration_applies(shell):
    shell.config.merge(Config({"TfosMagics": {"workers": 7}}))
    tfos_nb.magics.load(shell)
    assert next(one for one in shell.configurables if isinstance(one, TfosMagics)).workers == 7


def test_progress_in_config_overrides_the_variable(run, shell, monkeypatch):
    monkeypatch.setenv("TFOS_NB_PROGRESS", "text")
    magics = next(one for one in shell.configurables if isinstance(one, TfosMagics))
    assert not isinstance(magics.screen(), NoScreen)
    run("%config TfosMagics.progress = 'none'")
    assert isinstance(magics.screen(), NoScreen)
    _, shown = run(f"%%tfos_cluster mnist --data train_df\n{MAIN}")
    assert shown == ""


def test_height_and_proxy_url_reach_tensorboard(run, provided, tmp_path):
    run("%config TfosMagics.height = 500")
    run("%config TfosMagics.proxy_url = '/p/%PORT%/'")
    run(f"%tfos_tensorboard --logdir {tmp_path}")
    run(f"%tfos_tensorboard --logdir {tmp_path} --height 300")
    assert [options["height"] for _, _, options in provided.calls] == [500, 300]
    assert provided.calls[0][2]["proxy_url"] == "/p/%PORT%/"
