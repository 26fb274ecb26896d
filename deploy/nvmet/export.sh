#!/bin/sh
# Exports one device to trainers over NVMe/TCP with the Linux kernel's own target, nvmet, through
# configfs. Save this file on the storage node and run it there as root:
#
#     sh export.sh start      export the device; its contents do not change
#     sh export.sh verify     print if it is exported, and to which hosts
#     sh export.sh rotate     use the keys that are in their files now (a recipe with --auth)
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
keys=''
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

# key_text FILE: print a key without its end of line, after checks of its permissions and form.
key_text() {
    [ -f "$1" ] || fail "$1: there is no such key"
    case $(stat -c %a "$1") in
    600 | 400) ;;
    *) fail "$1: other users have access to it: chmod 0600 $1 first" ;;
    esac
    tr -d '\n' <"$1" | grep -Ex 'DHHC-1:0[0-3]:[A-Za-z0-9+/]{48,}=*:' || fail "$1: it contains no DHHC-1 key"
}
# set_keys HOST: connections of the host need its key from now on; open ones stay.
set_keys() {
    [ -n "$keys" ] || return 0
    [ -f "$nvmet/hosts/$1/dhchap_key" ] || fail "this kernel has no DH-HMAC-CHAP (Linux 6.0 or newer has)"
    text=$(key_text "$keys/$1") || exit 1
    printf %s "$text" >"$nvmet/hosts/$1/dhchap_key"
    echo 'hmac(sha256)' >"$nvmet/hosts/$1/dhchap_hash"
    echo ffdhe2048 >"$nvmet/hosts/$1/dhchap_dhgroup"
    [ -f "$keys/$nqn" ] || return 0
    text=$(key_text "$keys/$nqn") || exit 1
    printf %s "$text" >"$nvmet/hosts/$1/dhchap_ctrl_key"
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
        set_keys "$host" # before a port leads to the subsystem
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
        [ -z "$keys" ] || [ -n "$(cat "$nvmet/hosts/$host/dhchap_key")" ] || fail "$nqn: host $host needs no key"
    done
    for number in $ports; do
        [ -d "$nvmet/ports/$number/subsystems/$nqn" ] || fail "$nqn: nothing listens at port $number"
    done
    printf 'exported %s as %s at %s, ports %s, to:\n' "$device" "$nqn" "$address" "$ports"
    ls "$subsystem/allowed_hosts"
}

rotate() {
    [ -n "$keys" ] || fail "this export demands no keys"
    for host in $allowed_hosts; do
        set_keys "$host"
    done
}

undo() {
    remove_export
}

case ${1-} in
start | verify | rotate | undo) "$1" ;;
*) fail "expected start, verify, rotate or undo" ;;
esac
