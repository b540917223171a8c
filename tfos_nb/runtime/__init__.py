"""Everything that runs on an executor, and both ends of every wire.

::

    notebook's kernel = Spark driver                     executor
    ────────────────────────────────                     ────────
    Cluster ── ClusterController, FeedController         NodeTask (Spark task)
                  │                                         │ starts, and waits for
                Door ◀═══ one TLS port: gRPC ═══════════ supervisor ── heartbeats, output
                  ▲                                         │ socket pair
                  │                                      TF process: main(args, ctx)
                  │ where do rows go?                       ▲
                  └──────────────────────────────────── FeedTask (Spark task): Arrow Flight, unix socket or TLS

The input is Spark tasks with a plan, the user's code and rows. The output is messages to the driver, trained models and
rows with results. Every package of ``tfos_nb`` may import the runtime's packages. None of them imports a package
outside the runtime. A module here imports no notebook library, and TensorFlow only inside functions.
"""
