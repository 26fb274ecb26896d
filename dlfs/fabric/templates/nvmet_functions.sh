nvmet=${NVMET_CONFIGFS:-/sys/kernel/config/nvmet}
subsystem=$nvmet/subsystems/$nqn
namespace=$subsystem/namespaces/1

load_target() {
    [ -d "$nvmet" ] && return
    modprobe nvmet
    modprobe nvmet-tcp
    [ -d "$nvmet" ] || mount -t configfs none /sys/kernel/config
}

# is_encrypted PORT_FOLDER: true if a port demands TLS 1.3.
is_encrypted() {
    [ "$(cat "$1/addr_tsas" 2>/dev/null)" = tls1.3 ]
}

# add_host HOST: the host may connect, with its key (the script's set_keys) from the beginning.
add_host() {
    [ -d "$nvmet/hosts/$1" ] || mkdir "$nvmet/hosts/$1"
    set_keys "$1" # before a port leads to the subsystem
    [ -L "$subsystem/allowed_hosts/$1" ] || ln -s "$nvmet/hosts/$1" "$subsystem/allowed_hosts/$1"
}

# add_namespace DEVICE: export a device or file, unless that was done before.
add_namespace() {
    [ -d "$namespace" ] || mkdir "$namespace"
    [ "$(cat "$namespace/enable")" != 1 ] || return 0
    printf '%s\n' "$1" >"$namespace/device_path"
    echo "$uuid" >"$namespace/device_uuid"
    # From Linux 6.13 on: with reservations, the target refuses the writes of a second host.
    [ ! -f "$namespace/resv_enable" ] || echo 1 >"$namespace/resv_enable"
    echo 1 >"$namespace/enable"
}

add_ports() {
    for number in $ports; do
        add_port "$number"
    done
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
        [ -z "${tls_keys-}" ] || encrypt_port
    fi
    [ "$(cat "$port_folder/addr_traddr")" = "$address" ] || \
        fail "port $1 is in use at $(cat "$port_folder/addr_traddr"), not at $address"
    if is_encrypted "$port_folder"; then
        [ -n "${tls_keys-}" ] || fail "port $1 is in use by exports with TLS"
    elif [ -n "${tls_keys-}" ]; then
        fail "port $1 is in use by exports without TLS"
    fi
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
    for host in $hosts ${allowed_hosts-}; do
        rmdir "$nvmet/hosts/$host" 2>/dev/null || true # it stays if another export allows it
    done
}
