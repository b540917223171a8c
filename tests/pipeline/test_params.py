"""Every Param of the pipeline: its default, its setter and its type."""

from __future__ import annotations

import argparse
import inspect
import json

import pytest
from pyspark.ml.param import Params

from tfos_nb import TFEstimator
from tfos_nb.pipeline import params
from tfos_nb.pipeline.conversion import Namespace, TFParams
from tfos_nb.runtime.control.plan import InputMode

DEFAULTS = {
    "batch_size": 100, "cluster_size": 1, "driver_ps_nodes": False, "epochs": 1, "export_dir": None, "grace_secs": 30,
    "input_mapping": {}, "input_mode": "spark", "master_node": "chief", "model_dir": None, "num_ps": 0,
    "output_mapping": {}, "protocol": "grpc", "readers": 1, "signature_def_key": None, "steps": 1000, "tag_set": None,
    "tensorboard": False, "tfrecord_dir": None,
}  # fmt: skip
SETTERS = {
    "BatchSize": (3, "3"), "ClusterSize": (4, 0), "DriverPSNodes": (True, 2), "Epochs": (2, -1), "ExportDir": ("d", 5),
    "GraceSecs": (0, -1), "InputMapping": ({"a": "b"}, {"a": 1}), "MasterNode": ("master", 1), "ModelDir": ("m", ""),
    "NumPS": (2, 1.5), "OutputMapping": ({"t": "c"}, "t"), "Protocol": ("grpc", 1), "Readers": (2, 0),
    "SignatureDefKey": ("s", 1), "Steps": (5, 0), "TFRecordDir": ("t", 1), "TagSet": ("serve", []),
    "Tensorboard": (True, "yes"),
}  # fmt: skip

OF_A_FIT = {"HasFeed", "HasProgress", "HasRecovery", "HasResources", "HasRowRoles"}
MIXINS = [getattr(params, name) for name in params.__all__ if name not in OF_A_FIT]


class Everything(*MIXINS, TFParams):  # type: ignore[misc]
    """An object with all Params."""

    def __init__(self, args=None):
        super().__init__()
        self.args = Namespace(args)


def test_every_param_has_its_default_and_a_doc():
    everything = Everything()
    assert {param.name: everything.getOrDefault(param) for param in everything.params} == DEFAULTS
    assert all(param.doc for param in everything.params)


@pytest.mark.parametrize("setter", SETTERS)
def test_every_setter_accepts_only_its_type(setter):
    right, wrong = SETTERS[setter]
    everything = Everything()
    assert getattr(everything, f"set{setter}")(right) is everything
    assert getattr(everything, f"get{setter}")() == right
    with pytest.raises(TypeError):
        getattr(everything, f"set{setter}")(wrong)


def test_every_setter_of_a_mixin_is_tested():
    setters = {name for mixin in MIXINS for name, _ in inspect.getmembers(mixin) if name.startswith("set")}
    setters -= {name for name, _ in inspect.getmembers(Params)}
    assert setters == {f"set{name}" for name in SETTERS} | {"setInputMode"}


@pytest.mark.parametrize("given", [InputMode.TENSORFLOW, "tensorflow", "TENSORFLOW", 0])
def test_the_input_mode_is_a_name_or_a_number(given):
    everything = Everything().setInputMode(given)
    assert everything.getInputMode() is InputMode.TENSORFLOW
    assert json.dumps(everything.getOrDefault(everything.input_mode)) == '"tensorflow"'
    with pytest.raises(TypeError, match="must be 'spark' or 'tensorflow', got 'both'"):
        everything.setInputMode("both")


def test_arguments_are_merged_with_params():
    everything = Everything(argparse.Namespace(epochs=9, mine="x")).setEpochs(2)
    merged = everything.merge_args_params()
    assert (merged.epochs, merged.mine, merged.batch_size) == (2, "x", 100)
    assert everything.args.epochs == 9
    assert Everything(["--a", "1"]).merge_args_params().argv == ["--a", "1"]


def test_a_namespace_is_made_from_any_kind_of_arguments():
    made = Namespace({"a": 1})
    assert made == Namespace(argparse.Namespace(a=1)) == Namespace(made)
    assert list(made) == ["a"]
    assert "a" in made
    assert Namespace() == Namespace({})
    with pytest.raises(TypeError, match="tf_args is a int"):
        Namespace(5)


FITTING = {
    "BufferBytes": (10, 0), "Cpus": (2, 0), "FeedTimeout": (5.0, -1), "Gpus": (1, -1), "MinWorkers": (1, 0),
    "Progress": ("text", "loud"), "RendezvousTimeout": (5.0, "x"), "Restarts": (2, -1),
    "Seed": (3, "x"), "SlotTimeout": (5.0, 0), "Spill": (False, "no"),
    "ValidationIndicatorCol": ("v", 1), "WeightCol": ("w", 1),
}  # fmt: skip


@pytest.mark.parametrize("setter", FITTING)
def test_every_param_of_a_fit_accepts_only_its_type(setter):
    right, wrong = FITTING[setter]
    estimator = TFEstimator()
    assert getattr(estimator, f"set{setter}")(right) is estimator
    assert getattr(estimator, f"get{setter}")() == right
    with pytest.raises(TypeError):
        getattr(estimator, f"set{setter}")(wrong)


def test_an_estimator_has_every_param_by_keyword_and_explains_it():
    estimator = TFEstimator()
    assert DEFAULTS.keys() <= {param.name for param in estimator.params}
    given = {name: value for name, value in DEFAULTS.items() if value is not None}
    made = TFEstimator(None, {"mine": 1}, **given)
    assert {name: made.getOrDefault(name) for name in given} == given
    told = estimator.explainParams()
    assert all(f"{name}: " in told for name in DEFAULTS)
