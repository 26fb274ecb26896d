# What prolog and epilog share: the node service of one user on this node. Bash; sourced as root.
#
# A user's jobs on a node share one service, which runs as that user: with no more rights, and no other keys, than the
# user has. Two users never share one, since a client of a service can read all that the service can.
#
#   $RUNTIME/UID          root's, the lock of all that follows: exists while a job of the user has a service here
#   $RUNTIME/UID/jobs/ID  a mark for each of these jobs
#   $RUNTIME/UID/node     the user's, mode 700: socket, mnt, log
#
# Settings: deploy/slurm/slurm.conf.example. Everything is bounded by a time.
CONFIGURATION=${DLFS_SLURM_CONF:-/etc/dlfs/slurm.conf}
RUNTIME=/run/dlfs/slurm # as in task-prolog
VOLUME=
OPTIONS=
MOUNT=no
START_SECONDS=90
STOP_SECONDS=20
export PATH=${PATH:-/usr/sbin:/usr/bin:/sbin:/bin}
. "$CONFIGURATION"
umask 022

uid=${SLURM_JOB_UID:?expected the environment of a prolog or epilog of Slurm}
job=${SLURM_JOB_ID:?expected the environment of a prolog or epilog of Slurm}
place=$RUNTIME/$uid
service=unix:$place/node/socket

say() {
    echo "dlfs: ${SLURMD_NODENAME:-$HOSTNAME}: job $job: $*" >&2
}

# as_user SECONDS COMMAND...: by the rights and in the environment of the job's user, within a time.
as_user() {
    local seconds=$1 home
    shift
    home=$(getent passwd "$uid" | cut -d: -f6)
    timeout --kill-after=5 "$seconds" setpriv --reuid "$uid" --regid "${SLURM_JOB_GID:-$(id -g "$uid")}" --init-groups \
        env -i "PATH=$PATH" "HOME=${home:-/}" LANG=C.UTF-8 ${PYTHONPATH:+"PYTHONPATH=$PYTHONPATH"} "$@" 9>&-
}

# lock MAKE|FIND: holds the user's place by descriptor 9; with FIND, fails if there is none.
lock() {
    while :; do
        if [ "$1" = MAKE ]; then mkdir -p "$place/jobs" || { say "cannot make $place"; exit 1; }; fi
        { exec 9<"$place"; } 2>/dev/null || { [ "$1" = FIND ] && return 1; continue; }
        flock --wait 120 9 || { say "$place has been locked for 120 s"; exit 1; }
        # It may have been removed before the lock was had.
        [ "$place" -ef /proc/self/fd/9 ] && return
    done
}

# forget_ended_jobs: removes marks of jobs that this node does not run any more, as their epilog never ran here: slurmd was
# killed. Only Slurm knows; it is asked if there are other marks, and if it does not answer, they stay.
forget_ended_jobs() {
    local each running
    [ "$(ls "$place/jobs")" != "$1" ] || return 0
    running=$(timeout 20 squeue --noheader --format=%A --states=R,CG,CF,S,ST,SI,SO,RS --user="$uid" \
        --nodelist="$SLURMD_NODENAME") || return 0
    for each in $(ls "$place/jobs"); do
        [ "$each" = "$job" ] || grep -qx "$each" <<<"$running" || rm "$place/jobs/$each"
    done
}

# stop: ends the user's service, if there is one, and removes all that it left. Mounts go by the user's rights: the user may
# put a link in place of a folder meanwhile, and umount by root would follow it to any mount of the node.
stop() {
    local failed=0 mounted end
    as_user $((STOP_SECONDS + 60)) dlfs --quiet stop "$service" --timeout "$STOP_SECONDS" || failed=$?
    end=$((SECONDS + 60))
    # The last mount first, as others may be under it. The kernel writes blanks in paths as \040.
    while read -r mounted && ((SECONDS < end)); do
        as_user 10 fusermount3 -u -z "$(printf %b "$mounted")" </dev/null
    done < <(mounts | tac)
    [ -z "$(mounts)" ] || { failed=1; say "cannot unmount $(mounts)"; }
    rm -rf --one-file-system "$place/node" "$place/failure" || failed=$?
    return "$failed"
}

# mounts: prints the mounts in the user's place.
mounts() {
    awk -v at="$place/" 'index($5, at) == 1 { print $5 }' /proc/self/mountinfo
}

# run_hooks FOLDER: every executable file there, in order of the names, with the job's environment.
run_hooks() {
    local hook failed=0
    for hook in "$1"/*; do
        [ -f "$hook" ] && [ -x "$hook" ] || continue
        "$hook" 9>&- || { failed=$?; say "$hook: exit status $failed"; }
    done
    return "$failed"
}
