"""What the user's ``main(args, ctx)`` has: ``ctx``, strategies, coordinators, and the programs that estimators run.

In come a node's place in the plan and its rows; out come strategies, datasets and servers. Whatever a program can ask
of its node is a method of ``ctx``. Nodes import this package; it imports all packages below.
"""
