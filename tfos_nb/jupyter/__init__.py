"""Connect a page with the kernel: a web server in the kernel, and the file by which other processes find it.

The input is requests from Jupyter's server or from a one-time link, including Stop. The output is a cluster's state,
its log and TensorBoard. Clusters are passed in as objects, so this package does not import the driver. ``compat``,
``detached``, ``serverext`` and ``widgets`` import this package.
"""
