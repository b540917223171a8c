#!/bin/bash
# Kubernetes runs this in an executor's pod that it is about to end, and ends the pod when this has ended, or after
# terminationGracePeriodSeconds. SIGPWR makes the executor tell the driver, which decommissions it.
set -u

for process in /proc/[0-9]*; do
    if tr '\0' '\n' <"$process/cmdline" 2>/dev/null | grep -qx 'org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend'; then
        executor=${process#/proc/}
        # tini has the same words on its command line, and passes the signal on.
        [ "$(cat "$process/comm")" = java ] || continue
        kill -s PWR "$executor"
        while [ -e "$process" ]; do sleep 0.5; done
    fi
done
