#!/bin/sh
# Exports one device to trainers over NVMe/TCP with the Linux kernel's own target, nvmet, through
# configfs. Save this file on the storage node and run it there as root:
#
#     sh export.sh start      export the device; its contents do not change
#     sh export.sh verify     print if it is exported, and to which hosts
#     sh export.sh undo       undo what start did, and nothing else
#
# Several exports may share a node, its ports and its hosts; each needs a different NQN.
set -eu

# ---- settings ----------------------------------------------------------------------------------
device=/dev/nvme1n1
nqn=nqn.2024-01.org.example:storage-a
uuid=313393dd-339f-5d89-9eb7-935afd53c676
family=ipv4
address=10.0.0.11
ports='4420 8009'
allowed_hosts=nqn.2024-01.org.example:trainer
# ------------------------------------------------------------------------------------------------

nvmet=${NVMET_CONFIGFS:-/sys/kernel/config/nvmet}
subsystem=$nvmet/subsystems/$nqn
namespace=$subsystem/namespaces/1

load_target() {
    [ -d "$nvmet" ] && return
    modprobe nvmet
    modprobe nvmet-tcp
    [ -d "$nvmet" ] || mount -t configfs none /sys/kernel/config
}

# add_port NUMBER: the kernel listens on a port when the first subsystem is linked to it.
add_port() {
    port_folder=$nvmet/ports/$1
    if [ ! -d "$port_folder" ]; then
        mkdir "$port_folder"
        echo "$family" >"$port_folder/addr_adrfam"
        echo tcp >"$port_folder/addr_trtype"
        echo "$address" >"$port_folder/addr_traddr"
        echo "$1" >"$port_folder/addr_trsvcid"
    fi
    [ "$(cat "$port_folder/addr_traddr")" = "$address" ] || \
        fail "port $1 is in use at $(cat "$port_folder/addr_traddr"), not at $address"
    [ -L "$port_folder/subsystems/$nqn" ] || ln -s "$subsystem" "$port_folder/subsystems/$nqn"
}

# remove_export: undo what an export did, as far as it was done.
remove_export() {
    for number in $ports; do
        port_folder=$nvmet/ports/$number
        [ ! -L "$port_folder/subsystems/$nqn" ] || rm "$port_folder/subsystems/$nqn"
        if [ -d "$port_folder" ] && [ -z "$(ls "$port_folder/subsystems")" ]; then
            rmdir "$port_folder" # no other export uses it
        fi
    done
    [ -d "$subsystem" ] || return 0
    if [ -d "$namespace" ]; then
        echo 0 >"$namespace/enable"
        rmdir "$namespace"
    fi
    hosts=$(ls "$subsystem/allowed_hosts")
    for host in $hosts; do
        rm "$subsystem/allowed_hosts/$host"
    done
    rmdir "$subsystem"
    for host in $hosts; do
        rmdir "$nvmet/hosts/$host" 2>/dev/null || true # it stays if another export allows it
    done
}
fail() {
    printf 'export.sh: %s\n' "$*" >&2
    exit 1
}

# in_use NAME: true if a block device is mounted, swap, or part of another one.
in_use() {
    cut -d' ' -f3 /proc/self/mountinfo | grep -qxF "$(cat "/sys/class/block/$1/dev")" ||
        cut -d' ' -f1 /proc/mounts /proc/swaps | grep -qxF "/dev/$1" ||
        [ -n "$(ls "/sys/class/block/$1/holders" 2>/dev/null)" ]
}

check_device() {
    [ -b "$device" ] || [ -f "$device" ] || fail "$device: there is no such block device or file"
    [ -b "$device" ] || return 0
    disk=$(basename "$(readlink -f "$device")")
    for part in "/sys/class/block/$disk" "/sys/class/block/$disk/$disk"*; do
        [ ! -d "$part" ] || ! in_use "${part##*/}" || fail "$device: this machine uses ${part##*/}"
    done
}

start() {
    check_device
    load_target
    [ ! -d "$subsystem" ] || fail "$nqn is exported already; undo it first"
    trap undo EXIT
    mkdir "$subsystem"
    echo 0 >"$subsystem/attr_allow_any_host"
    for host in $allowed_hosts; do
        [ -d "$nvmet/hosts/$host" ] || mkdir "$nvmet/hosts/$host"
        ln -s "$nvmet/hosts/$host" "$subsystem/allowed_hosts/$host"
    done
    mkdir "$namespace"
    printf '%s\n' "$device" >"$namespace/device_path"
    echo "$uuid" >"$namespace/device_uuid"
    # From Linux 6.13 on: with reservations, the target refuses the writes of a second host.
    [ ! -f "$namespace/resv_enable" ] || echo 1 >"$namespace/resv_enable"
    echo 1 >"$namespace/enable"
    for number in $ports; do
        add_port "$number"
    done
    trap - EXIT
    verify
}

verify() {
    [ -d "$subsystem" ] || fail "$nqn is not exported"
    [ "$(cat "$namespace/device_path")" = "$device" ] || fail "$nqn exports another device"
    [ "$(cat "$namespace/enable")" = 1 ] || fail "$nqn: its namespace is not enabled"
    [ "$(cat "$subsystem/attr_allow_any_host")" = 0 ] || fail "$nqn: any host may connect"
    for host in $allowed_hosts; do
        [ -d "$subsystem/allowed_hosts/$host" ] || fail "$nqn: host $host may not connect"
    done
    for number in $ports; do
        [ -d "$nvmet/ports/$number/subsystems/$nqn" ] || fail "$nqn: nothing listens at port $number"
    done
    printf 'exported %s as %s at %s, ports %s, to:\n' "$device" "$nqn" "$address" "$ports"
    ls "$subsystem/allowed_hosts"
}

undo() {
    remove_export
}

case ${1-} in
start | verify | undo) "$1" ;;
*) fail "expected start, verify or undo" ;;
esac
