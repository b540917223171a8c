"""Implement ``%tfos_spark`` and ``%tfos_doctor``, which show the Spark session and check the environment."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class

from tfos_nb.errors import PlanError
from tfos_nb.magics import parsers
from tfos_nb.magics.clusters import clusters_of
from tfos_nb.magics.defaults import Defaults
from tfos_nb.magics.diagnosis import checks, spark_checks
from tfos_nb.magics.diagnosis.doctor import Check, examine
from tfos_nb.magics.diagnosis.report import Finding, show_findings
from tfos_nb.widgets.hosts import Host, detect_host, parent_server

__all__ = ["SparkLines"]


@magics_class
class SparkLines(Magics):
    """Line magics that show the Spark session and check the environment.

    Parameters
    ----------
    shell : InteractiveShell
        The user's shell.
    defaults : Defaults
        The settings of ``%config``.
    """

    def __init__(self, shell: InteractiveShell, defaults: Defaults) -> None:
        super().__init__(shell)
        self._shell = shell
        self._namespace: dict[str, Any] = shell.user_ns
        self._defaults = defaults

    @line_magic
    def tfos_spark(self, line: str) -> None:
        """Show the Spark session; start an embedded one where there is none."""
        found = parsers.SPARK.understand(line)
        asked = {name: getattr(found, name) for name in ("slots", "name", "conf") if getattr(found, name) is not None}
        if found.stop:
            if asked:
                raise PlanError(
                    f"--stop cannot be combined with --{next(iter(asked))}; start a session in another line"
                )
            self._stop()
            return
        from tfos_nb.driver import prewarm  # here, since it imports Spark
        from tfos_nb.spark.session import active_session, spark_session

        host = detect_host()
        if host.refusal:
            raise PlanError(host.refusal)
        spark = active_session()
        if spark is not None and asked:
            raise PlanError(f"--{next(iter(asked))}: a session runs already; %tfos_spark --stop ends it first")
        started = spark is None
        if spark is None:
            conf = dict(asked.get("conf", ()))
            spark = spark_session(asked.get("slots"), app_name=asked.get("name", "tfos_nb"), conf=conf)
        more = [Finding("variable", "ok", self._name(spark))] if self._name(spark) else []
        title = "Spark was started" if started else "Spark runs"
        show_findings(title, [*spark_checks.describe_session(spark, host, self._defaults.proxy_url), *more])
        if self._defaults.prewarm:
            prewarm.begin(spark)

    @line_magic
    def tfos_doctor(self, line: str) -> None:
        """Check the requirements of tfos_nb, and say how to install what is missing."""
        parsers.DOCTOR.understand(line)
        host = detect_host()
        findings = examine(self._checks(host))
        wrong = sum(finding.state == "missing" for finding in findings)
        title = f"{wrong} to fix" if wrong else "All requirements of tfos_nb are met"
        show_findings(f"tfos_nb doctor · {title}", findings)

    def _checks(self, host: Host) -> list[Check]:
        return [
            Check("packages", checks.look_at_packages),
            Check("Java", checks.look_at_java, 20.0),
            Check("GPUs", checks.look_at_gpus),
            Check("notebook", partial(checks.look_at_host, host, self._defaults.progress)),
            Check("server extension", lambda: checks.look_at_server(parent_server())),
            Check("sparkmonitor", partial(self._look_at_sparkmonitor, host), 10.0),
            Check("variables", checks.look_at_variables),
            Check(
                "Spark",
                partial(spark_checks.look_at_spark, host, self._defaults.proxy_url),
                spark_checks.PROBE_SECONDS + 20.0,
            ),
        ]

    def _look_at_sparkmonitor(self, host: Host) -> list[Finding]:
        return checks.look_at_sparkmonitor(self._shell, host, spark_checks.session_settings())

    def _name(self, spark: Any) -> str:
        """Store the session in the variable ``spark`` and return that name; return '' if it has another value."""
        from tfos_nb.spark.session import is_stopped

        value = self._namespace.get("spark")
        if value is not None and value is not spark and not is_stopped(value):
            return ""
        self._namespace["spark"] = spark
        return "spark"

    def _stop(self) -> None:
        from tfos_nb.spark.session import active_session

        running = [name for name, one in clusters_of(self._namespace).items() if not one.snapshot().status.ended]
        if running:
            raise PlanError(f"--stop: {running[0]} still runs on this session; %tfos_stop {running[0]} ends it first")
        spark = active_session()
        if spark is None:
            raise PlanError("--stop: no Spark session runs")
        spark.stop()
        sys.stdout.write("Spark was stopped\n")


for _name, _parser in {"tfos_spark": parsers.SPARK, "tfos_doctor": parsers.DOCTOR}.items():
    vars(SparkLines)[_name].getdoc = _parser.document
