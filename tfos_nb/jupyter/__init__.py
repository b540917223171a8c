"""Connect a page with the kernel: a web server in the kernel, and the file by which other processes find it.

The input is requests from Jupyter's server or from a signed link. The output is a cluster's state, its log and
TensorBoard; Stop is a request too. Clusters are passed in as objects, so this package does not import the driver.
"""
