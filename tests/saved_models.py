"""Fixtures of models of every kind, made once, and of the rows that fit them (``tests/conftest.py``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.conftest import ENVIRONMENT, SCRIPT_SECONDS

__all__ = ["close", "column", "kinds", "known", "make_models", "rows"]

ROWS = 50

MAKE = """
import keras, numpy as np, os, shutil, tensorflow as tf
from keras import Input, Model, layers

keras.utils.set_random_seed(3)
x = np.random.default_rng(3).normal(size=({rows}, 4)).astype("float32")
given = Input((4,), name="x")
middle = layers.Dense(5, activation="relu", name="middle")(given)
dense = Model(given, layers.Dense(3, activation="softmax", name="last")(middle))
dense.save("dense.keras"), dense.save("dense.h5"), dense.export("dense", verbose=False)
features = Model(given, middle).predict(x, verbose=0)

left, right = Input((4,), name="left"), Input((), name="right", dtype="int32")
far = layers.Dense(2, name="far")(layers.Concatenate()([left, layers.Embedding(5, 2)(right)]))
pair = Model([left, right], [far, layers.Dense(1, name="near")(far)])
pair.save("pair.keras")
b = (np.arange({rows}) % 5).astype("int32")
by_pair = pair.predict([x, b], verbose=0)

class Several(tf.Module):
    def __init__(self):
        self.factor = tf.Variable(3.0)
    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float32, name="x")])
    def times(self, x):
        return {{"product": x * self.factor, "total": tf.reduce_sum(x * self.factor, 1)}}
    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float32, name="x")])
    def plus(self, x):
        return {{"sum": x + self.factor}}
several = Several()
tf.saved_model.save(several, "several", signatures={{"times": several.times, "plus": several.plus}})
tf.saved_model.save(several, "only", signatures={{"times": several.times}})

# as TensorFlow 1 wrote them
v1 = tf.compat.v1
with tf.Graph().as_default(), v1.Session() as session:
    at = v1.placeholder(tf.float32, (None, 4), name="at")
    weight = v1.get_variable("weight", initializer=tf.constant(np.arange(8, dtype="float32").reshape(4, 2)))
    hidden = tf.matmul(at, weight, name="hidden")
    tf.nn.relu(hidden, name="shown")
    session.run(v1.global_variables_initializer())
    os.makedirs("graph_checkpoint")
    for step in (1, 2):
        session.run(weight.assign(weight * step))
        v1.train.Saver().save(session, "graph_checkpoint/model.ckpt", global_step=step)
    v1.saved_model.simple_save(session, "graph", {{"at": at}}, {{"shown": session.graph.get_tensor_by_name("shown:0")}})
graph_hidden = x @ (np.arange(8, dtype="float32").reshape(4, 2) * 2)

# weights alone, newer than the model beside them
os.makedirs("beside"), os.makedirs("built"), os.makedirs("weights"), os.makedirs("mixed")
dense.save("beside/model.keras")
dense.set_weights([w * 2 for w in dense.get_weights()])
doubled = dense.predict(x, verbose=0)
for folder in ("beside", "built"):
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(net=dense, step=tf.Variable(7)), folder, 2)
    manager.save()
dense.save_weights("weights/last.weights.h5")
os.makedirs("empty")
os.makedirs("torch"), open("torch/pytorch_model.bin", "w").write("x")
os.makedirs("broken"), open("broken/saved_model.pb", "w").write("no")
shutil.copytree("built", "unfit")

@keras.saving.register_keras_serializable("somebody")
class Twice(layers.Layer):
    def call(self, inputs):
        return 2 * inputs
keras.Sequential([Input((4,)), Twice()]).save("twice.keras")

# as a later Keras and a later TensorFlow would write them
import json, zipfile
with zipfile.ZipFile("dense.keras") as old, zipfile.ZipFile("later.keras", "w") as new:
    for name in old.namelist():
        content = old.read(name)
        if name == "metadata.json":
            content = json.dumps({{**json.loads(content), "keras_version": "99.1.0"}}).encode()
        new.writestr(name, content.replace(b'"class_name": "Dense"', b'"class_name": "Denser"'))
shutil.copytree("only", "later")
from tensorflow.core.protobuf import saved_model_pb2
graph = saved_model_pb2.SavedModel.FromString(open("later/saved_model.pb", "rb").read())
graph.meta_graphs[0].meta_info_def.tensorflow_version = "99.1.0"
for function in graph.meta_graphs[0].graph_def.library.function:
    for node in function.node_def:
        node.op = node.op.replace("Mul", "MulOfTomorrow")
open("later/saved_model.pb", "wb").write(graph.SerializeToString())

picture = Input((4, 6, 3), name="picture")
Model(picture, layers.GlobalAveragePooling2D(name="mean")(picture)).save("picture.keras")
small = np.zeros((4, 6, 3), "uint8"); small[..., 0] = 200; small[..., 2] = 10
large = np.repeat(np.repeat(small, 2, 0), 2, 1)
for name, pixels in (("small", small), ("large", large)):
    tf.io.write_file(name + ".png", tf.io.encode_png(pixels))

words = Input((), dtype="string", name="word")
Model(words, layers.StringLookup(vocabulary=["a", "b"])(words)).export("words", verbose=False)

np.savez("expected.npz", x=x, b=b,
         dense=keras.models.load_model("dense.keras").predict(x, verbose=0), features=features,
         far=by_pair[0], near=by_pair[1], graph_hidden=graph_hidden, doubled=doubled)
"""


def make_models(folder: Path, script: str) -> Path:
    """Run a script that saves models into a folder, in a separate process; return the folder."""
    command, environment = [sys.executable, "-c", script], {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "-1"}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SCRIPT_SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("kinds"), MAKE.format(rows=ROWS))


@pytest.fixture(scope="session")
def known(kinds: Path) -> dict[str, np.ndarray[Any, Any]]:
    with np.load(kinds / "expected.npz") as file:
        return dict(file)


@pytest.fixture(scope="session")
def rows(spark: SparkSession, known: dict[str, Any]) -> DataFrame:
    """An id, the array x of 4, and the whole number b, in three partitions."""
    values = [(i, x.tolist(), int(b)) for i, (x, b) in enumerate(zip(known["x"], known["b"], strict=True))]
    return spark.createDataFrame(values, "id int, x array<float>, b int").repartition(3).cache()


def column(scored: DataFrame, name: str = "prediction") -> np.ndarray[Any, Any]:
    return np.array([row[name] for row in scored.orderBy("id").select("id", name).collect()])


def close(found: Any, expected: Any) -> bool:
    assert np.shape(found) == np.shape(expected)
    return bool(np.allclose(found, expected, rtol=1e-5, atol=1e-6))
