"""Build tfos_nb. Metadata is in pyproject.toml; here is what lies outside the package."""

from glob import glob

from setuptools import setup

CONFIG = "jupyter_server_config.d"
setup(
    data_files=[
        (f"etc/jupyter/{CONFIG}", glob(f"jupyter-config/{CONFIG}/*.json")),
        ("share/tfos_nb/notebooks", glob("notebooks/*.ipynb")),
        ("share/tfos_nb/kubernetes", glob("docs/kubernetes/*")),
    ]
)
