"""Build tfos_nb. Metadata is in pyproject.toml; here is only what Jupyter must find outside the package."""

from glob import glob

from setuptools import setup

CONFIG = "jupyter_server_config.d"
setup(data_files=[(f"etc/jupyter/{CONFIG}", glob(f"jupyter-config/{CONFIG}/*.json"))])
