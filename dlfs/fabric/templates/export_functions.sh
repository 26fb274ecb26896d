discovery=nqn.2014-08.org.nvmexpress.discovery

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

# run VERB: what the command line asks for.
run() {
    case ${1-} in
    start | verify | rotate | undo) "$1" ;;
    *) fail "expected start, verify, rotate or undo" ;;
    esac
}
