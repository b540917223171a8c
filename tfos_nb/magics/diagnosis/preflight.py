"""Check a plan with Spark and describe the result, without starting anything."""

from __future__ import annotations

from tfos_nb.errors import PlanError, counted
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.widgets.hosts import detect_host

__all__ = ["preflight"]


def preflight(plan: ClusterPlan) -> str:
    """Return a line that says whether the Spark session can run the plan, or which Spark would be started."""
    refusal = detect_host().refusal
    if refusal:
        return f"Spark would refuse it: {refusal}"
    from tfos_nb.driver.launching import survey
    from tfos_nb.spark.contexts import context_of  # here, since these modules import Spark
    from tfos_nb.spark.contexts.named import named_spark
    from tfos_nb.spark.session import active_session, gives_gpus, slots_busy, slots_total

    spark = active_session()
    if spark is None:
        named = named_spark()
        then = f"takes {named}" if named else "starts an embedded one with enough slots"
        return f"Spark: there is no session yet; %%tfos_cluster or %tfos_spark {then}."
    context = context_of(spark)
    try:
        survey(spark, plan)
        if context.grows:
            return f"The plan fits: {_started_for(plan, gives_gpus(spark))}. Nothing was started."
        total, busy = slots_total(spark, timeout=5.0), sum(stage.tasks for stage in slots_busy(spark))
    except PlanError as error:
        return f"Spark would refuse it: {error}"
    needs = f"it needs {len(plan.nodes)} of {total} slots of {context.master}, {busy} are busy"
    return f"The plan fits: {needs}. Nothing was started."


def _started_for(plan: ClusterPlan, gives_gpus: bool) -> str:
    """Say which executors dynamic allocation starts for a plan, and which of them with GPUs."""
    with_gpus = [str(node) for node in plan.spark_nodes if gives_gpus and plan.gpus_of(node)]
    others = [str(node) for node in plan.spark_nodes if str(node) not in with_gpus]
    kinds = [f"with {counted(plan.gpus, 'GPU')} each for {', '.join(with_gpus)}"] if with_gpus else []
    kinds += [f"without GPUs for {', '.join(others)}"] if with_gpus and others else []
    return "Spark starts executors that are missing" + (f", {' and '.join(kinds)}" if kinds else "")
