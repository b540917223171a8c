"""A program of TensorFlowOnSpark 1.x and 2.x for inference through the cluster: an RDD in, an RDD out.

Run as ``python mnist_feed_inference.py MASTER --images_labels CSV --export_dir DIR --output DIR``.
"""

from __future__ import annotations

import argparse
import sys


def main_fun(args, ctx):
    import numpy as np
    import tensorflow as tf

    predict = tf.saved_model.load(args.export_dir).signatures["serving_default"]
    tf_feed = ctx.get_data_feed(train_mode=False)
    while not tf_feed.should_stop():
        batch = tf_feed.next_batch(100)
        if len(batch) > 0:
            numbers = np.array([[float(x) for x in line.split(",")] for line in batch])
            scores = next(iter(predict(tf.constant(numbers[:, 1:] / 16.0, tf.float32)).values()))
            found = np.argmax(scores, axis=1)
            tf_feed.batch_results([f"{int(label)} {guess}" for label, guess in zip(numbers[:, 0], found, strict=True)])


if __name__ == "__main__":
    from pyspark.conf import SparkConf
    from pyspark.context import SparkContext

    from tfos_nb.compat import TFCluster

    sc = SparkContext(conf=SparkConf().setMaster(sys.argv.pop(1)).setAppName("mnist_feed_inference"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster_size", type=int, default=2)
    parser.add_argument("--images_labels")
    parser.add_argument("--export_dir")
    parser.add_argument("--output")
    args = parser.parse_args()
    cluster = TFCluster.run(sc, main_fun, args, args.cluster_size, 0, False, TFCluster.InputMode.SPARK)
    lines = sc.textFile(args.images_labels, 3)
    cluster.inference(lines).saveAsTextFile(args.output)
    cluster.shutdown()
    print("answered")
    sc.stop()
