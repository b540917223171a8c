"""The way from a page to the kernel: a web server in the kernel, and the file by which others find it.

In come requests from Jupyter's server or by a signed link; out come a cluster's state, its log, TensorBoard, and Stop.
It sees clusters by what they are handed in as, and imports no driver.
"""
