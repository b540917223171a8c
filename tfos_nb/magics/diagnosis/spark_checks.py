"""Check the Spark session: its settings, its executors' Python, and whether executors reach the driver."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import PlanError
from tfos_nb.magics.diagnosis.report import Finding
from tfos_nb.ports import allowed_ports
from tfos_nb.runtime.node.executor_probe import PROBE_SECONDS, Probe
from tfos_nb.widgets.hosts import Host, proxied_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["PROBE_SECONDS", "describe_session", "look_at_spark", "session_settings"]

REGISTER_SECONDS = 5.0
"""Seconds to wait for executors that are still registering."""

_HOSTS_TOLD = 3
_NODE_NEEDS = ("tfos_nb", "tensorflow", "keras", "pyarrow", "grpc", "msgpack", "pandas")
_DOOR = "driver's port"


def session_settings() -> dict[str, str] | None:
    """Return the configuration of the existing session; None if there is none."""
    from tfos_nb.spark.contexts import context_of
    from tfos_nb.spark.session import active_session

    spark = active_session()
    return None if spark is None else context_of(spark).settings()


def describe_session(spark: SparkSession, host: Host, proxy_url: str = "") -> list[Finding]:
    """Report the Spark version and master, its busy slots, and the addresses of its UI and its log."""
    from tfos_nb.spark.contexts import context_of, is_connect
    from tfos_nb.spark.session import LOG_CONF, slots_busy, slots_total

    context = context_of(spark)
    conf = context.settings()
    busy = slots_busy(spark)
    total, taken = slots_total(spark, timeout=REGISTER_SECONDS), sum(stage.tasks for stage in busy)
    told = f"{taken} of {total} busy" + "".join(f"; {stage.tasks} by '{stage.description}'" for stage in busy)
    more = "; Spark starts executors for tasks that wait (dynamic allocation)" if context.grows else ""
    connect = ", over Spark Connect" if is_connect(spark) else ""
    found = [
        Finding("Spark", "ok", f"{spark.version}, {context.master}, called {context.name}{connect}"),
        Finding("slots", "ok" if taken < total or context.grows else "warn", told + more),
    ]
    if context.ui:
        found.append(Finding("Spark's UI", "ok", context.ui, link=_through_proxy(context.ui, host, conf, proxy_url)))
    if conf.get(LOG_CONF):
        found.append(Finding("log", "ok", conf[LOG_CONF]))
    return found


def _through_proxy(url: str, host: Host, conf: Mapping[str, str], template: str) -> str:
    """Return the address of Spark's UI for the user's browser if it goes through a proxy; else empty."""
    port = url.rpartition(":")[2].strip("/")
    if not port.isdigit():
        return ""
    try:
        address = proxied_url(int(port), "jobs/", host, template=template, spark_conf=conf) or ""
    except PlanError:  # another check names the wrong variable
        return ""
    return "" if address.startswith("http://127.0.0.1:") else address


def look_at_spark(host: Host, proxy_url: str = "") -> list[Finding]:
    """Check the session, its executors' Python, and whether executors reach the driver's port."""
    from tfos_nb.spark.session import active_session

    spark = active_session()
    if spark is None:
        return [_look_for_spark(), _look_at_door(None)]
    try:
        found = describe_session(spark, host, proxy_url)
    except PlanError as error:
        return [Finding("Spark", "missing", str(error))]
    return [*found, _dynamic_allocation(spark), *_look_from_executor(spark)]


def _look_for_spark() -> Finding:
    """Report which Spark would be used if there is no session yet; check a Spark Connect server's port."""
    from tfos_nb.spark.contexts.named import check_server, named_spark

    named = named_spark()
    try:
        check_server()
    except PlanError as error:
        return Finding("Spark", "missing", str(error))
    then = f"takes {named}" if named else "starts an embedded one"
    return Finding("Spark", "ok", f"no session yet; %%tfos_cluster or %tfos_spark {then}")


def _dynamic_allocation(spark: SparkSession) -> Finding:
    from tfos_nb.spark.contexts import context_of
    from tfos_nb.spark.contexts.base import UNLIMITED

    what, context = "dynamic allocation", context_of(spark)
    if not context.has_dynamic_allocation:
        return Finding(what, "ok", "off")
    if context.grows:
        most = context.most_executors
        number = "any number" if most >= UNLIMITED else f"at most {most}"
        return Finding(what, "ok", f"on: Spark starts executors for nodes, {number} of each size")
    kept = int(context.setting("spark.dynamicAllocation.minExecutors", "0"))
    told = f"on: nodes fit only on the {kept} executors that it always keeps"
    return Finding(what, "ok" if kept else "warn", told, "" if kept else "spark.dynamicAllocation.minExecutors=N")


def _addresses(spark: SparkSession | None) -> tuple[str, str, range]:
    """Return the host name by which a cluster's driver is reached, its listening address, and its allowed ports."""
    from tfos_nb.spark.contexts import context_of

    own = os.environ.get("TFOS_SERVER_HOST") or "127.0.0.1"
    host, bind = (own, own) if spark is None else context_of(spark).address()
    return host, bind, allowed_ports("TFOS_SERVER_PORT")


def _look_at_door(spark: SparkSession | None) -> Finding:
    """Check whether the driver could listen and reach itself, if no executor can run a check."""
    from tfos_nb.spark.reachability import listening

    try:
        host, bind, ports = _addresses(spark)
        with listening(bind, ports) as port:
            reason = Probe(host, port, ()).unreachable()
    except PlanError as error:
        return Finding(_DOOR, "missing", str(error), "TFOS_SERVER_HOST and TFOS_SERVER_PORT say where it listens")
    return _door_finding(host, port, reason, "this machine")


def _door_finding(host: str, port: int, reason: str, whose: str) -> Finding:
    if not reason:
        return Finding(_DOOR, "ok", f"{host} can be reached from {whose}")
    told = f"{host}:{port} cannot be reached from {whose}: {reason}"
    return Finding(_DOOR, "missing", told, "set TFOS_SERVER_HOST to an address of this machine that executors reach")


def _look_from_executor(spark: SparkSession) -> list[Finding]:
    """Run one task that checks its executor, if a slot is free for it."""
    from tfos_nb.driver.launching import error_of_job
    from tfos_nb.driver.prewarm import look as look_at_hosts
    from tfos_nb.spark.contexts import context_of
    from tfos_nb.spark.reachability import look_from_executor
    from tfos_nb.spark.session import slots_busy, slots_total

    what = "executors' Python"
    full = sum(stage.tasks for stage in slots_busy(spark)) >= slots_total(spark, timeout=REGISTER_SECONDS)
    if full and not context_of(spark).grows:
        return [Finding(what, "warn", "no slot is free to look from"), _look_at_door(spark)]
    try:
        host, bind, ports = _addresses(spark)
        port, row = look_from_executor(spark, host, bind, ports, _NODE_NEEDS)
    except PlanError as error:
        return [Finding(what, "missing", str(error), _SET_PYTHON)]
    except Exception as error:  # noqa: BLE001 - whatever Spark raises of its job is what was found
        return [Finding(what, "missing", str(error_of_job(error, "the executors' Python")), _SET_PYTHON)]
    return [
        _python_finding(what, row),
        _warmth_finding(look_at_hosts(spark)),
        _door_finding(host, port, row["unreachable"], "the executors"),
    ]


def _warmth_finding(states: Mapping[str, str]) -> Finding:
    """Report on which hosts a node starts without importing TensorFlow."""
    by_state: dict[str, list[str]] = {}
    for host, state in sorted(states.items()):
        by_state.setdefault(state, []).append(host)
    told = "; ".join(f"{state} on {', '.join(hosts[:_HOSTS_TOLD])}{_more(hosts)}" for state, hosts in by_state.items())
    return Finding("warm processes", "ok", told or "none: tasks have GPUs, or no executor is there yet")


def _more(hosts: list[str]) -> str:
    return f" and {len(hosts) - _HOSTS_TOLD} more" if len(hosts) > _HOSTS_TOLD else ""


def _python_finding(what: str, row: Any) -> Finding:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if row["version"] != here:
        return Finding(what, "missing", f"{row['python']} is {row['version']}, not {here} as here", _SET_PYTHON)
    if row["missing"]:
        return Finding(what, "missing", f"{row['python']} has no {row['missing'].replace(' ', ', ')}", _SET_PYTHON)
    return Finding(what, "ok", f"{row['version']}, {row['python']}")


_SET_PYTHON = "set PYSPARK_PYTHON to an environment like this one on every executor, then start Spark again"
