#!/bin/sh
# Exports one device to trainers over NVMe/TCP with SPDK's target, nvmf_tgt, by JSON-RPC. Requires a
# running nvmf_tgt (SPDK 24.01 or newer) and spdk-rpc (pip install spdk). Save this file on the
# storage node and run it there as the user of nvmf_tgt:
#
#     sh export.sh start      export the device; its contents do not change
#     sh export.sh verify     print if it is exported, and to which hosts
#     sh export.sh rotate     use the keys that are in their files now (with --auth or --tls)
#     sh export.sh undo       undo what start did, and nothing else
#
# Several exports may share one nvmf_tgt; each needs a different NQN. nvmf_tgt loses all exports when
# it ends: start them again then. With --tls, start nvmf_tgt with --wait-for-rpc: the script sets what
# can be set only then, and lets it go on. The kernel drives the device, through its asynchronous
# I/O; for an NVMe drive that SPDK drives itself, see bdev_nvme_attach_controller in SPDK's guide.
set -eu

# ---- settings ----------------------------------------------------------------------------------
@SETTINGS@
# ------------------------------------------------------------------------------------------------

socket=${SPDK_RPC_SOCKET:-/var/tmp/spdk.sock}
tls_buffer_bytes=2097152
transfer_bytes_max=1048576 # SPDK's default, 128 KiB, would split the reads of whole chunks

@EXPORT_FUNCTIONS@
rpc() {
    spdk-rpc -s "$socket" "$@"
}

check_target() {
    command -v spdk-rpc >/dev/null || fail "spdk-rpc is not installed: pip install spdk"
    rpc spdk_get_version >/dev/null 2>&1 || fail "no nvmf_tgt answers at $socket"
}

# add_key FILE KIND OPTION: make a key known to nvmf_tgt; adds OPTION with its name to $key_options.
# The name is new each time, since nvmf_tgt keeps what it has read.
add_key() {
    key_text "$1" "$2" >/dev/null || exit 1
    name=$bdev-$(printf %s "$1" | cksum | cut -d' ' -f1)-$(date +%s%N)
    rpc keyring_file_add_key "$name" "$1" >/dev/null
    key_options="$key_options $3 $name"
}

# add_keys HOST: make the host's present keys known to nvmf_tgt; sets $key_options for the commands
# of a host.
add_keys() {
    key_options=
    if [ -n "$keys" ]; then
        add_key "$keys/$1" DHHC-1 --dhchap-key
        [ ! -f "$keys/$nqn" ] || add_key "$keys/$nqn" DHHC-1 --dhchap-ctrlr-key
    fi
    [ -z "$tls_keys" ] || add_key "$tls_keys/$1.tls" NVMeTLSkey-1 --psk
}

# remove_keys KEEP: remove this export's keys from nvmf_tgt but those whose names KEEP lists.
remove_keys() {
    [ -n "$keys$tls_keys" ] || return 0
    for name in $(rpc keyring_get_keys | python3 -c '
import json, sys
print(*(key["name"] for key in json.load(sys.stdin) if key["name"].startswith(sys.argv[1])))
' "$bdev-"); do
        case " $1 " in
        *" $name "*) ;;
        *) rpc keyring_file_remove_key "$name" >/dev/null ;;
        esac
    done
}

# exported CHECK: ask nvmf_tgt for its subsystems and run one check on them.
exported() {
    rpc nvmf_get_subsystems | python3 -c '
import json, sys
check, discovery, nqn, bdev, uuid, address, port, discovery_port, *hosts = sys.argv[1:]
subsystems = {one["nqn"]: one for one in json.load(sys.stdin)}
one = subsystems.get(nqn)
def listens(nqn, port):
    found = subsystems[nqn]["listen_addresses"]
    return any((at["traddr"], at["trsvcid"]) == (address, port) for at in found)
if check == "started":
    sys.exit(one is None)
if check == "discovery":
    sys.exit(not listens(discovery, discovery_port))
if check == "unlisted":  # prints the hosts of the discovery service that only this export allows
    def allowed(*names):
        return {host["nqn"] for name in names for host in subsystems[name]["hosts"]}
    print(*(allowed(discovery) & set(hosts) - allowed(*(subsystems.keys() - {discovery, nqn}))))
    sys.exit()
if check == "shared":  # true if another export uses the discovery service
    sys.exit(not any(listens(other, port) for other in subsystems if other not in (discovery, nqn)))
def expect(what, wanted, got):
    if wanted != got:
        sys.exit(f"export.sh: {nqn}: {what}: expected {wanted}, got {got}")
expect("exported", True, one is not None)
spaces = [(space["nsid"], space["bdev_name"], space["uuid"]) for space in one["namespaces"]]
expect("namespaces", [(1, bdev, uuid)], spaces)
expect("any host may connect", False, one["allow_any_host"])
expect("hosts", sorted(hosts), sorted(host["nqn"] for host in one["hosts"]))
expect(f"listens at {address} port {port}", True, listens(nqn, port))
expect(f"discovery at {address} port {discovery_port}", True, listens(discovery, discovery_port))
' "$1" "$discovery" "$nqn" "$bdev" "$uuid" "$address" "$port" "$discovery_port" $allowed_hosts
}

# list_host HOST: the discovery service answers the host, and over TLS with its present key. It
# answers any host while no export of this nvmf_tgt has TLS.
list_host() {
    if [ -n "$tls_keys" ]; then
        rpc nvmf_subsystem_remove_host "$discovery" "$1" >/dev/null 2>&1 || true
        rpc nvmf_subsystem_add_host "$discovery" "$1" --psk "${key_options##* }"
    else # an error if another export has listed it
        rpc nvmf_subsystem_add_host "$discovery" "$1" >/dev/null 2>&1 || true
    fi
}

add_listener() {
    rpc nvmf_subsystem_add_listener "$1" -t TCP -f "$family" -a "$address" -s "$2" \
        ${tls_keys:+--secure-channel}
}

# prepare_tls: enlarge the buffers of TLS. With SPDK's default, a read of 64 KiB waits 44 ms. They
# can be changed only before nvmf_tgt initializes itself.
prepare_tls() {
    size=$tls_buffer_bytes
    if rpc sock_impl_set_options -i ssl -r "$size" -s "$size" >/dev/null 2>&1; then
        rpc framework_start_init >/dev/null
        rpc framework_wait_init >/dev/null
    elif ! rpc sock_impl_get_options -i ssl | grep -q "\"recv_buf_size\": $size"; then
        echo "export.sh: reads over TLS will be slow: start nvmf_tgt with --wait-for-rpc" >&2
    fi
}

start() {
    check_device
    check_target
    [ -z "$tls_keys" ] || prepare_tls
    ! exported started || fail "$nqn is exported already; undo it first"
    rpc nvmf_get_transports --trtype TCP >/dev/null 2>&1 || \
        rpc nvmf_create_transport -t TCP -i "$transfer_bytes_max"
    trap undo EXIT
    block_bytes=
    [ -b "$device" ] || block_bytes=4096
    rpc bdev_aio_create -u "$uuid" "$device" "$bdev" $block_bytes >/dev/null
    rpc nvmf_create_subsystem "$nqn"
    for host in $allowed_hosts; do
        add_keys "$host"
        rpc nvmf_subsystem_add_host "$nqn" "$host" $key_options
        list_host "$host"
    done
    [ -z "$tls_keys" ] || rpc nvmf_subsystem_allow_any_host "$discovery" --no-allow-any-host
    rpc nvmf_subsystem_add_ns -n 1 -u "$uuid" "$nqn" "$bdev" >/dev/null
    add_listener "$nqn" "$port"
    exported discovery || add_listener "$discovery" "$discovery_port"
    trap - EXIT
    verify
}

verify() {
    check_target
    exported whole
    printf 'exported %s as %s at %s, ports %s, to:\n' "$device" "$nqn" "$address" "$ports"
    printf '%s\n' $allowed_hosts
}

rotate() {
    [ -n "$keys$tls_keys" ] || fail "this export demands no keys"
    check_target
    present=
    for host in $allowed_hosts; do
        add_keys "$host"
        if [ -z "$tls_keys" ]; then
            rpc nvmf_subsystem_set_keys "$nqn" "$host" $key_options
        else # SPDK has no other way to change a TLS key. The connections of the host end.
            rpc nvmf_subsystem_remove_host "$nqn" "$host"
            rpc nvmf_subsystem_add_host "$nqn" "$host" $key_options
            list_host "$host"
        fi
        present="$present $key_options"
    done
    remove_keys "$present"
}

undo() {
    check_target
    if exported discovery && ! exported shared; then
        rpc nvmf_subsystem_remove_listener "$discovery" -t TCP -f "$family" -a "$address" \
            -s "$discovery_port"
        [ -z "$tls_keys" ] || rpc nvmf_subsystem_allow_any_host "$discovery" --allow-any-host
    fi
    for host in $(exported unlisted); do
        rpc nvmf_subsystem_remove_host "$discovery" "$host"
    done
    ! exported started || rpc nvmf_delete_subsystem "$nqn"
    remove_keys ""
    ! rpc bdev_get_bdevs -b "$bdev" >/dev/null 2>&1 || rpc bdev_aio_delete "$bdev"
}

run "$@"
