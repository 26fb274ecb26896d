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
