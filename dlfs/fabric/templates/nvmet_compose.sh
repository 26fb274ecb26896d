# Composes namespaces on nvmet, each in a file; dlfs/fabric/composing/nvmet.py runs it by sh -s VERB.
# Every verb may be run again: it leaves what is right as it is. Exit codes are errnos.
set -eu
umask 077

@SETTINGS@

@NVMET_FUNCTIONS@

fail() {
    printf '%s\n' "$*" >&2
    exit "${code:-1}"
}

# list: print a line for each composed namespace: NQN, UUID, size in bytes, file, listeners, hosts, and
# those with a key.
list() {
    for each in "$nvmet"/subsystems/*; do
        [ "$(cat "$each/attr_model" 2>/dev/null)" = "$model" ] || continue
        [ -d "$each/namespaces/1" ] || continue
        path=$(cat "$each/namespaces/1/device_path")
        printf '%s\t%s\t' "${each##*/}" "$(cat "$each/namespaces/1/device_uuid")"
        printf '%s\t%s\t' "$(stat -c %s "$path" 2>/dev/null || echo 0)" "$path"
        for port in "$nvmet"/ports/*; do
            [ ! -L "$port/subsystems/${each##*/}" ] || \
                printf '%s %s ' "$(cat "$port/addr_traddr")" "$(cat "$port/addr_trsvcid")"
        done
        printf '\t%s\t' "$(ls "$each/allowed_hosts" | tr '\n' ' ')"
        for host in $(ls "$each/allowed_hosts"); do
            [ -z "$(cat "$nvmet/hosts/$host/dhchap_key" 2>/dev/null)" ] || printf '%s ' "$host"
        done
        printf '\n'
    done
}

# allocate BYTES: reserve the space of the file up to that size.
allocate() {
    fallocate -l "$1" "$file.new" 2>/dev/null || {
        rm -f "$file.new"
        code=28 fail "$store has no room for $1 bytes, or its file system cannot reserve them"
    }
}

check_size() {
    found=$(stat -c %s "$file")
    [ "$found" = "$size_bytes" ] || \
        code=17 fail "$name exists with $found bytes, not $size_bytes; resize changes the size"
}

# check_owner: the subsystem is composed, or one that an earlier run did not finish.
check_owner() {
    [ "$(cat "$subsystem/attr_model")" = "$model" ] || [ -z "$(ls "$subsystem/namespaces")" ] || \
        code=17 fail "$nqn is exported already, and was not composed"
    [ ! -d "$namespace" ] || [ "$(cat "$namespace/enable")" = 0 ] || \
        [ "$(cat "$namespace/device_path")" = "$file" ] || \
        code=17 fail "$nqn exports $(cat "$namespace/device_path")"
}

# set_keys HOST: new connections of the host need the keys; a kernel's host has one for all exports.
set_keys() {
    [ -n "$dhchap_key" ] || return 0
    [ -f "$nvmet/hosts/$1/dhchap_key" ] || fail "this kernel has no DH-HMAC-CHAP (Linux 6.0 or newer has)"
    printf %s "$dhchap_key" >"$nvmet/hosts/$1/dhchap_key"
    [ -z "$dhchap_ctrl_key" ] || printf %s "$dhchap_ctrl_key" >"$nvmet/hosts/$1/dhchap_ctrl_key"
}

create() {
    load_target
    [ -d "$store" ] || code=2 fail "$store: there is no such folder"
    [ ! -d "$subsystem" ] || check_owner
    if [ -e "$file" ]; then
        check_size
    else
        allocate "$size_bytes"
        mv "$file.new" "$file"
    fi
    if [ ! -d "$subsystem" ]; then
        trap remove_export EXIT
        mkdir "$subsystem"
    fi
    [ "$(cat "$subsystem/attr_model")" = "$model" ] || printf '%s' "$model" >"$subsystem/attr_model"
    echo 0 >"$subsystem/attr_allow_any_host"
    for host in $allowed_hosts; do
        add_host "$host"
    done
    for host in $(ls "$subsystem/allowed_hosts"); do
        case " $allowed_hosts " in
        *" $host "*) ;;
        *) rm "$subsystem/allowed_hosts/$host" && { rmdir "$nvmet/hosts/$host" 2>/dev/null || true; } ;;
        esac
    done
    add_namespace "$file"
    add_ports
    trap - EXIT
}

resize() {
    if [ "$size_bytes" -lt "$(stat -c %s "$file")" ]; then
        truncate -s "$size_bytes" "$file"
    else
        fallocate -l "$size_bytes" "$file" 2>/dev/null || \
            code=28 fail "$store has no room for $size_bytes bytes"
    fi
    echo 1 >"$namespace/revalidate_size" # the kernel tells the hosts
}

withdraw() {
    remove_export
    [ "$delete" = 0 ] || rm -f "$file"
}

"$1"
