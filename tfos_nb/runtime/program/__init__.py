"""Tools of the user's ``main(args, ctx)``: ``ctx``, strategies, coordinators, and the programs of estimators.

The input is a node's place in the plan and its rows. The output is strategies, datasets and servers. Everything that a
program can ask of its node is a method of ``ctx``. ``compat``, ``driver``, ``pipeline`` and ``runtime.node`` import
this package. It imports the runtime's packages below it, except host and tfrecord.
"""
