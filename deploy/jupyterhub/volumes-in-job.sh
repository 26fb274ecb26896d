# For the script of a job that is a server of JupyterHub: sh, sourced. dlfs_volumes.slurm writes the commands that use it.
#
#   dlfs_volume NAME OPTION... -- URI     starts to mount a volume
#   dlfs_volumes_ready                    waits for all, at most DLFS_WAIT_S seconds, and sets DLFS_VOLUMES
#
# Where Slurm's prolog has mounted the volumes of the user on this node, at DLFS_MOUNT, nothing is mounted. What is mounted
# here is unmounted when the script ends. Of a volume that cannot be mounted, a file says why; the server starts all the same.
DLFS_VOLUMES=${DLFS_MOUNT:-}
export DLFS_VOLUMES
if [ -z "$DLFS_VOLUMES" ]; then
    DLFS_VOLUMES=$(mktemp -d "/tmp/dlfs-volumes-${SLURM_JOB_ID:-$$}-XXXXXX")
    trap dlfs_volumes_end EXIT
fi

dlfs_volume() {
    if [ -z "${DLFS_MOUNT:-}" ]; then dlfs_mount "$@" & fi
}

# In a process of its own for each volume.
dlfs_mount() {
    name=$1
    shift
    for word; do
        shift
        if [ "$word" = -- ]; then break; fi
        set -- "$@" "$word"
    done
    uri=$1
    shift
    mkdir "$DLFS_VOLUMES/$name"
    reason=$DLFS_VOLUMES/$name.NOT-MOUNTED.txt
    code=0
    timeout --kill-after=5 "$DLFS_WAIT_S" "$DLFS" --quiet mount --no-uring "$@" -- "$uri" "$DLFS_VOLUMES/$name" \
        </dev/null >/dev/null 2>"$reason" || code=$?
    if [ "$code" = 0 ]; then
        rm "$reason"
        return
    fi
    rmdir "$DLFS_VOLUMES/$name"
    if [ "$code" = 124 ] || [ "$code" = 137 ]; then echo "no answer within $DLFS_WAIT_S s" >>"$reason"; fi
    echo "dlfs: volume $name: not mounted: $(tail -n 1 "$reason")" >&2
}

dlfs_volumes_ready() {
    wait
}

dlfs_volumes_end() {
    for mounted in "$DLFS_VOLUMES"/*/; do
        # A link in place of a directory is not followed.
        if mountpoint -q "$mounted"; then "$DLFS" --quiet umount --lazy "${mounted%/}" </dev/null || true; fi
        rmdir "$mounted" 2>/dev/null || true
    done
    rm -rf --one-file-system "$DLFS_VOLUMES"
}
