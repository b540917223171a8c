"""Defaults of the magics' options, set by ``%config TfosMagics.…``.

A line overrides ``%config``, and ``%config`` overrides the built-in defaults.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from traitlets import Bool, Enum, Float, Int, TraitError, Unicode, validate
from traitlets.config import Configurable

from tfos_nb.driver.settings import Settings
from tfos_nb.errors import PlanError
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.widgets.hosts import check_proxy_url
from tfos_nb.widgets.live import NoScreen, Screen, choose_screen

__all__ = ["Defaults"]

_LAUNCH = {
    "workers": "workers",
    "cpus": "cpus",
    "gpus": "gpus",
    "model_dir": "model_dir",
    "timeout": "rendezvous_timeout",
    "feed_timeout": "feed_timeout",
    "grace": "grace",
    "restarts": "restarts",
    "background": "background",
    "tensorboard": "tensorboard",
}
"""Names of traits, with the fields of LaunchOptions for which they are defaults."""

_OWN = "; 0: as tfos_nb.launch has it"


class Defaults(Configurable):
    """The traits of :class:`~tfos_nb.magics.cluster.TfosMagics`."""

    workers = Int(ClusterPlan.workers, min=0, help="--workers where the line names no number").tag(config=True)
    cpus = Int(ClusterPlan.cpus, min=1, help="--cpus: Spark CPUs of each node").tag(config=True)
    gpus = Int(ClusterPlan.gpus, min=0, help="--gpus: GPUs of each worker and of the chief").tag(config=True)
    model_dir = Unicode("", help="--model-dir: where checkpoints and models go").tag(config=True)
    timeout = Float(0.0, min=0, help=f"--timeout: seconds for all nodes to come{_OWN}").tag(config=True)
    feed_timeout = Float(0.0, min=0, help=f"--feed-timeout: seconds without a row taken{_OWN}").tag(config=True)
    grace = Float(Settings.grace, min=0, help="--grace: seconds to end in when stopped; 0: none").tag(config=True)
    restarts = Int(0, min=0, help="--restarts: how often the nodes start again when one was lost").tag(config=True)
    background = Bool(False, help="--background: cells return at once; --wait on the line waits").tag(config=True)
    tensorboard = Bool(False, help="--tensorboard: run TensorBoard on the chief's host").tag(config=True)
    prewarm = Bool(True, help="have executors import TensorFlow as soon as there is a session").tag(config=True)
    progress = Enum(
        ["", "auto", "widget", "html", "text", "none"],
        "",
        help="how a running cluster is shown; empty: as the variable TFOS_NB_PROGRESS says",
    ).tag(config=True)
    proxy_url = Unicode(
        "", help="the URL under which the browser reaches a port of this machine, with %PORT% in the port's place"
    ).tag(config=True)
    height = Int(800, min=100, max=10_000, help="pixels of TensorBoard's frame").tag(config=True)

    @validate("proxy_url")
    def _check_proxy_url(self, proposal: dict[str, Any]) -> str:
        value = str(proposal["value"]).strip()
        try:
            if value:
                check_proxy_url("TfosMagics.proxy_url", value)
        except PlanError as error:
            raise TraitError(str(error)) from None
        return value

    @validate("timeout", "feed_timeout", "grace")
    def _check_seconds(self, proposal: dict[str, Any]) -> float:
        value = float(proposal["value"])
        if not value <= threading.TIMEOUT_MAX:  # also true for NaN
            name = proposal["trait"].name
            raise TraitError(
                f"TfosMagics.{name}={value}: must be a number of seconds, at most {threading.TIMEOUT_MAX:.0f}"
            )
        return value

    def launch_defaults(self) -> dict[str, Any]:
        """Return the configured values that differ from the built-in defaults, by the fields of LaunchOptions."""
        values = {field: getattr(self, trait) for trait, field in _LAUNCH.items()}
        built_in = {field: self.traits()[trait].default() for trait, field in _LAUNCH.items()}
        return {field: value for field, value in values.items() if value != built_in[field]}

    def screen(self, quiet: bool = False) -> Screen:
        """Return the screen on which a cluster is shown; none if ``quiet``."""
        if quiet:
            return NoScreen()
        if not self.progress:
            return choose_screen()
        return choose_screen({**os.environ, "TFOS_NB_PROGRESS": self.progress})
