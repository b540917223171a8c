"""A program for inference in the way of TensorFlowOnSpark 2.x: each executor scores its share of the files.

Run as ``python mnist_inference.py MASTER --images_labels DIR --export_dir DIR --output DIR``.
"""

from __future__ import annotations

import argparse
import sys


def inference(args, ctx):
    import os

    import numpy as np
    import tensorflow as tf

    saved_model = tf.saved_model.load(args.export_dir, tags="serve")
    predict = saved_model.signatures["serving_default"]
    files = sorted(tf.io.gfile.glob(args.images_labels + "/part-*"))[ctx.worker_num :: ctx.num_workers]
    tf.io.gfile.makedirs(args.output)
    with tf.io.gfile.GFile(f"{args.output}/part-{ctx.worker_num:05d}", "w") as output:
        for file in files:
            rows = np.loadtxt(file, delimiter=",", ndmin=2)
            scores = next(iter(predict(tf.constant(rows[:, 1:] / 16.0, tf.float32)).values()))
            for label, prediction in zip(rows[:, 0], np.argmax(scores, axis=1), strict=True):
                output.write(f"{int(label)} {prediction} {os.environ.get('TF_CONFIG', 'alone')}\n")


if __name__ == "__main__":
    from pyspark.conf import SparkConf
    from pyspark.context import SparkContext

    from tfos_nb.compat import TFParallel

    sc = SparkContext(conf=SparkConf().setMaster(sys.argv.pop(1)).setAppName("mnist_inference"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster_size", type=int, default=2)
    parser.add_argument("--images_labels")
    parser.add_argument("--export_dir")
    parser.add_argument("--output")
    args, _ = parser.parse_known_args()
    TFParallel.run(sc, inference, args, args.cluster_size)
    print("scored")
    sc.stop()
