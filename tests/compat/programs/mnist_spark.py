"""A usual training program of TensorFlowOnSpark 2.x: rows fed from Spark into a generator, on several workers.

Run as ``python mnist_spark.py MASTER --images_labels CSV --export_dir DIR …``. Only its imports refer to tfos_nb.
"""

from __future__ import annotations

import argparse
import sys


def main_fun(args, ctx):
    import numpy as np
    import tensorflow as tf

    from tfos_nb.compat import TFNode, compat

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tf_feed = TFNode.DataFeed(ctx.mgr)

    def rdd_generator():
        while not tf_feed.should_stop():
            batch = tf_feed.next_batch(1)
            if len(batch) == 0:
                return
            image = np.array(batch[0][0]).astype(np.float32) / 16.0
            label = np.array(batch[0][1]).astype(np.int64).reshape((1,))
            yield (image, label)

    shapes = (tf.TensorShape([64]), tf.TensorShape([1]))
    dataset = tf.data.Dataset.from_generator(rdd_generator, (tf.float32, tf.int64), shapes).batch(args.batch_size)
    options = tf.data.Options()
    compat.disable_auto_shard(options)
    dataset = dataset.with_options(options)

    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input((64,)),
                tf.keras.layers.Dense(32, activation="relu"),
                tf.keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile(
            tf.keras.optimizers.Adam(0.01), tf.keras.losses.SparseCategoricalCrossentropy(), metrics=["accuracy"]
        )

    # Nine tenths of the steps: the workers' shares of the rows differ, and none may run out of rows.
    steps_per_epoch = int(args.rows / args.batch_size / ctx.num_workers * 0.9)
    history = model.fit(x=dataset, epochs=args.epochs, steps_per_epoch=steps_per_epoch, verbose=0)
    compat.export_saved_model(model, args.export_dir, ctx.job_name == "chief")
    print("ends with accuracy", history.history["accuracy"][-1])
    tf_feed.terminate()


def parse(line):
    numbers = [int(number) for number in line.split(",")]
    return (numbers[1:], numbers[0])


if __name__ == "__main__":
    from pyspark.conf import SparkConf
    from pyspark.context import SparkContext

    from tfos_nb.compat import TFCluster

    sc = SparkContext(conf=SparkConf().setMaster(sys.argv.pop(1)).setAppName("mnist_keras"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--cluster_size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images_labels")
    parser.add_argument("--export_dir")
    parser.add_argument("--tensorboard", action="store_true")
    args = parser.parse_args()

    images_labels = sc.textFile(args.images_labels, 4).map(parse)
    args.rows = images_labels.count()
    cluster = TFCluster.run(
        sc,
        main_fun,
        args,
        args.cluster_size,
        num_ps=0,
        tensorboard=args.tensorboard,
        input_mode=TFCluster.InputMode.SPARK,
        master_node="chief",
        log_dir=None,
    )
    cluster.train(images_labels, args.epochs)
    cluster.shutdown(grace_secs=30)
    print("trained")
    sc.stop()
