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
@SETTINGS@
# ------------------------------------------------------------------------------------------------

@NVMET_FUNCTIONS@
@EXPORT_FUNCTIONS@
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
@TLS_IDENTITY@
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

start() {
    check_device
    check_tls
    load_target
    [ ! -d "$subsystem" ] || fail "$nqn is exported already; undo it first"
    trap undo EXIT
    mkdir "$subsystem"
    echo 0 >"$subsystem/attr_allow_any_host"
    for host in $allowed_hosts; do
        add_host "$host"
        set_tls_key "$host"
    done
    add_namespace "$device"
    add_ports
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

run "$@"
