#!/bin/bash
# What a container of the image runs. Spark starts an executor's with the argument "executor" and says the rest in
# variables, as to its own images; anything else is a command.
set -eu

# Java has no name for a user who is not in /etc/passwd, such as the one that OpenShift chooses, and Hadoop's classes
# fail without one.
if ! getent passwd "$(id -u)" >/dev/null; then
    { cat /etc/passwd; echo "spark:x:$(id -u):$(id -g)::$HOME:/bin/false"; } >"${TMPDIR:-/tmp}/passwd"
    export LD_PRELOAD=libnss_wrapper.so NSS_WRAPPER_PASSWD="${TMPDIR:-/tmp}/passwd" NSS_WRAPPER_GROUP=/etc/group
fi

if [ "${1:-}" != executor ]; then
    exec tini -s -- "$@"
fi

options=()
for ((number = 0; ; number++)); do
    name=SPARK_JAVA_OPT_$number
    [ -n "${!name+given}" ] || break
    options+=("${!name}")
done

# An executor that Kubernetes ends leaves when Spark's tasks have, and nodes are no tasks: they save a state first, which
# they could not if this container ended with the executor. They leave by themselves, at the latest when they miss the
# driver.
run() {
    trap : TERM
    "$@" &
    wait $! && code=0 || code=$?
    while kill -0 $! 2>/dev/null; do wait $! && code=0 || code=$?; done
    while grep -qsa '[t]fos_nb[.]runtime[.]node[.]supervisor' /proc/[0-9]*/cmdline; do sleep 0.2; done
    return $code
}
export -f run
exec tini -g -- bash -c 'run "$@"' bash "$JAVA_HOME/bin/java" "${options[@]}" \
    "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
    -cp "${SPARK_CONF_DIR:-$SPARK_HOME/conf}:${SPARK_CLASSPATH:-}:$SPARK_HOME/jars/*" \
    org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
    --driver-url "$SPARK_DRIVER_URL" \
    --executor-id "$SPARK_EXECUTOR_ID" \
    --cores "$SPARK_EXECUTOR_CORES" \
    --app-id "$SPARK_APPLICATION_ID" \
    --hostname "$SPARK_EXECUTOR_POD_IP" \
    --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
    --podName "$SPARK_EXECUTOR_POD_NAME"
