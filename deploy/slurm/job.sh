# For batch scripts: bash, sourced. srun.sbatch and torchrun.sbatch show its use.
#
# run_job COMMAND...: runs COMMAND, which calls srun, with a node service on every node at $DLFS_SERVICE, and ends the script
# with its status. Where no prolog has started a service, the job does, as a step of its own, of the volume $DLFS_VOLUME.
#
# A node that fails ends srun before Slurm knows of it, and the script then fails, which is no reason for Slurm to start the
# job again. So the script asks for it, up to DLFS_RESTARTS times (5), unless the job was cancelled or its time is up.
run_job() {
    local service="" code
    local on_each_node=(srun --overlap --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1)
    if [ -z "${DLFS_SERVICE:-}" ]; then
        if [ -n "${SLURM_HET_SIZE:-}" ]; then # the step would be of the first component only
            echo "dlfs: expected services by a prolog, as this job is heterogeneous; there is no DLFS_SERVICE" >&2
            exit 1
        fi
        export DLFS_SERVICE=unix:/tmp/dlfs-$SLURM_JOB_ID/socket
        "${on_each_node[@]}" "$DLFS_SLURM/serve-in-job" ${DLFS_OPTIONS:-} "${DLFS_VOLUME:?expected the volume to serve}" &
        service=$!
    fi
    "$@"
    code=$?
    if [ -n "$service" ]; then
        # Then the step ends by itself, once it has removed its folder.
        timeout 60 "${on_each_node[@]}" dlfs --quiet stop "$DLFS_SERVICE" || kill "$service"
        wait "$service"
    fi
    if [ "$code" != 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${DLFS_RESTARTS:-5}" ] &&
        [ "$(squeue --noheader --format=%T --job="$SLURM_JOB_ID")" = RUNNING ]; then
        echo "exit status $code: the job starts again" >&2
        scontrol requeue "$SLURM_JOB_ID" && sleep 600 # Slurm ends the script
    fi
    exit "$code"
}
