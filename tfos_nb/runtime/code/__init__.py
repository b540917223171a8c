"""The user's own code on its way to the executors.

In comes a function on the driver; out comes, on an executor, the same function with its modules, the text of its
source, and the classes that a model of the user's needs. It imports no other package.
"""
