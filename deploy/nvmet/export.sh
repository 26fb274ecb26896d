#!/bin/sh
# Exports one device to trainers over NVMe/TCP with the Linux kernel's own target, nvmet, through
# configfs. Save this file on the storage node and run it there as root:
#
#     sh export.sh start      export the device; its contents do not change
#     sh export.sh verify     print if it is exported, and to which hosts
#     sh export.sh rotate     use the keys that are in their files now (with --auth or --tls)
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
tls_keys=''
# ------------------------------------------------------------------------------------------------

discovery=nqn.2014-08.org.nvmexpress.discovery

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

# key_text FILE KIND: print a key of a kind without its end of line, after checks of its permissions
# and form.
key_text() {
    [ -f "$1" ] || fail "$1: there is no such key"
    case $(stat -c %a "$1") in
    600 | 400) ;;
    *) fail "$1: other users have access to it: chmod 0600 $1 first" ;;
    esac
    tr -d '\n' <"$1" | grep -Ex "$2:0[0-3]:[A-Za-z0-9+/]{48,}=*:" || fail "$1: it contains no $2 key"
}
# set_keys HOST: connections of the host need its key from now on; open ones stay.
set_keys() {
    [ -n "$keys" ] || return 0
    [ -f "$nvmet/hosts/$1/dhchap_key" ] || fail "this kernel has no DH-HMAC-CHAP (Linux 6.0 or newer has)"
    text=$(key_text "$keys/$1" DHHC-1) || exit 1
    printf %s "$text" >"$nvmet/hosts/$1/dhchap_key"
    echo 'hmac(sha256)' >"$nvmet/hosts/$1/dhchap_hash"
    echo ffdhe2048 >"$nvmet/hosts/$1/dhchap_dhgroup"
    [ -f "$keys/$nqn" ] || return 0
    text=$(key_text "$keys/$nqn" DHHC-1) || exit 1
    printf %s "$text" >"$nvmet/hosts/$1/dhchap_ctrl_key"
}

# tls_secret set|remove HOST SUBSYSTEM...: replace the host's TLS keys for subsystems in the kernel's
# keyring by the one of standard input, or remove them. tlshd finds keys there by their identities.
tls_secret() {
    python3 /dev/fd/3 "$@" 3<<'END'
import base64, hashlib, hmac, subprocess, sys, zlib

def expand(digest: str, key: bytes, label: bytes, context: bytes) -> bytes:
    """Compute HKDF-Extract without a salt, then HKDF-Expand-Label for as many bytes as the hash."""
    count = hashlib.new(digest).digest_size
    extracted = hmac.new(b"", key, digest).digest()
    info = count.to_bytes(2, "big") + bytes([len(label)]) + label + bytes([len(context)]) + context
    return hmac.new(extracted, info + b"\1", digest).digest()

def derive(text: str, host_nqn: str, subsystem_nqn: str, version: int) -> tuple[str, bytes]:
    """Return the identity and the secret of a TLS handshake, from a valid key NVMeTLSkey-1."""
    _, hash_id, encoded, _ = text.split(":")
    key = base64.b64decode(encoded)[:-4]  # without its CRC
    digest, suite = ("sha256", 1) if len(key) == 32 else ("sha384", 2)
    retained = key if hash_id == "00" else expand(digest, key, b"tls13 HostNQN", host_nqn.encode())
    names = f"{host_nqn} {subsystem_nqn}"
    identity = context = f"NVMe{version}R{suite:02} {names}"
    if version == 1:
        check = hmac.new(retained, f"{names} NVMe-over-Fabrics".encode(), digest).digest()
        encoded = base64.b64encode(check).decode()
        identity, context = f"{identity} {encoded}", f"{suite:02} {encoded}"
    return identity, expand(digest, retained, b"tls13 nvme-tls-psk", context.encode())

def keyctl(*words, **options):
    return subprocess.run(["keyctl", *words], check=True, stdout=subprocess.PIPE, **options).stdout

verb, host, *subsystems = sys.argv[1:]
keyring = "%:.nvme"
kept = []
if verb == "set":
    text = sys.stdin.read()
    data = base64.b64decode(text.split(":")[2])
    if len(data) not in (36, 52) or zlib.crc32(data[:-4]).to_bytes(4, "little") != data[-4:]:
        sys.exit("export.sh: a TLS key is damaged: its CRC does not match")
    for subsystem in subsystems:
        identity, secret = derive(text, host, subsystem, 1)
        kept += keyctl("padd", "psk", identity, keyring, input=secret).split()
for key in keyctl("rlist", keyring).split():
    words = keyctl("rdescribe", key).decode().split(";", 4)[-1].split()
    if words[1:2] == [host] and words[2] in subsystems and key not in kept:
        keyctl("unlink", key, keyring)
END
}

# set_tls_key HOST: connections of the host need its present TLS key from now on; open ones stay.
set_tls_key() {
    [ -n "$tls_keys" ] || return 0
    text=$(key_text "$tls_keys/$1.tls" NVMeTLSkey-1) || exit 1
    printf %s "$text" | tls_secret set "$1" "$nqn" "$discovery" ||
        fail "host $1: its TLS key cannot be used"
}

# remove_tls_keys HOST: the key for discovery stays if another export allows the host.
remove_tls_keys() {
    [ -n "$tls_keys" ] || return 0
    unused=$nqn
    [ -d "$nvmet/hosts/$1" ] || unused="$nqn $discovery"
    tls_secret remove "$1" $unused </dev/null
}

# encrypt_port: the port in $port_folder demands TLS.
encrypt_port() {
    [ -f "$port_folder/addr_tsas" ] || fail "this kernel has no TLS (Linux 6.7 or newer has)"
    echo tls1.3 >"$port_folder/addr_tsas"
}

check_tls() {
    [ -n "$tls_keys" ] || return 0
    for program in keyctl python3; do
        command -v $program >/dev/null || fail "TLS needs $program on this machine"
    done
    pidof tlshd >/dev/null || fail "TLS needs tlshd, which is not running (ktls-utils)"
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
    check_tls
    load_target
    [ ! -d "$subsystem" ] || fail "$nqn is exported already; undo it first"
    trap undo EXIT
    mkdir "$subsystem"
    echo 0 >"$subsystem/attr_allow_any_host"
    for host in $allowed_hosts; do
        [ -d "$nvmet/hosts/$host" ] || mkdir "$nvmet/hosts/$host"
        ln -s "$nvmet/hosts/$host" "$subsystem/allowed_hosts/$host"
        set_keys "$host" # before a port leads to the subsystem
        set_tls_key "$host"
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
    check_tls
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
        [ -z "$tls_keys" ] || is_encrypted "$nvmet/ports/$number" ||
            fail "$nqn: port $number demands no TLS"
    done
    printf 'exported %s as %s at %s, ports %s, to:\n' "$device" "$nqn" "$address" "$ports"
    ls "$subsystem/allowed_hosts"
}

rotate() {
    [ -n "$keys$tls_keys" ] || fail "this export demands no keys"
    for host in $allowed_hosts; do
        set_keys "$host"
        set_tls_key "$host"
    done
}

undo() {
    remove_export
    for host in $allowed_hosts; do
        remove_tls_keys "$host"
    done
}

case ${1-} in
start | verify | rotate | undo) "$1" ;;
*) fail "expected start, verify, rotate or undo" ;;
esac
