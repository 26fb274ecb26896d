"""``dlfs key``: makes, imports and lists the keys with which this host proves its identity.

A key is never an argument and never printed.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Annotated

import typer

from dlfs.cli.options import JsonOption
from dlfs.cli.output import Table, human_date, note, print_data, print_json, result_of_change
from dlfs.cli.verb import add_verb, make_group

app = make_group("Keep the keys with which hosts and storage nodes prove their identity.")

_NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the key, as in ?dhchap_key=NAME of a URI.")
]
_ReplaceOption = Annotated[bool, typer.Option("--replace", help="Rotate a key of that name.")]


def generate(
    name: _NameArgument,
    hash_id: Annotated[int, typer.Option("--hash", metavar="1|2|3")] = 1,
    tls: Annotated[bool, typer.Option("--tls")] = False,
    replace: _ReplaceOption = False,
) -> None:
    """Make a random key; its file is printed, the key is not.

    Args:
        hash_id: SHA-256, -384 or -512: a key of 32, 48 or 64 bytes.
        tls: A pre-shared key for TLS.

    Examples:
        dlfs key generate trainer
        dlfs key generate trainer --replace
    """
    from dlfs.fabric.keys import KeyKind, generate_key, write_key

    kind = KeyKind.TLS if tls else KeyKind.DHCHAP
    written = write_key(name, generate_key(kind, hash_id=hash_id), replace=replace)
    with result_of_change():
        print(written)
    note("copy this file to the storage node over a safe channel")


def import_(
    name: _NameArgument,
    file: Annotated[str, typer.Argument(metavar="[FILE]")] = "-",
    derive: Annotated[str | None, typer.Option("--derive", metavar="PURPOSE")] = None,
    replace: _ReplaceOption = False,
) -> None:
    """Import a key, such as one of 'nvme gen-dhchap-key', from standard input or a file.

    Args:
        file: File with the key; -: standard input.
        derive: Import the key that is derived from it for this purpose instead.

    Examples:
        dlfs key import node1 </media/keys/node1
        dlfs key import job-7 /etc/dlfs/keys/site --derive job-7
    """
    from dlfs.errors import DeviceError, UsageError
    from dlfs.fabric.keys import TEXT_BYTES_MAX, KeyKind, derive_key, write_key

    if file.startswith(tuple(KeyKind)):  # not shown by the error of a missing file
        raise UsageError(
            "read a key: expected a file or -, got a key; it is in the shell's history"
        )
    if file == "-" and sys.stdin is None:
        raise UsageError("read a key: expected a file or a pipe, got a closed standard input")
    try:
        if file == "-":
            text = sys.stdin.read(TEXT_BYTES_MAX + 2)
        else:
            with open(file, encoding="ascii") as source:
                text = source.read(TEXT_BYTES_MAX + 2)
    except OSError as error:
        raise DeviceError(f"read {file}: {error.strerror}", error.errno or 0) from error
    except UnicodeDecodeError:
        raise UsageError("read a key: expected ASCII") from None
    key = text.strip() if derive is None else derive_key(text.strip(), derive)
    written = write_key(name, key, replace=replace)
    with result_of_change():
        print(written)


def list_(json: JsonOption = False) -> None:
    """List the keys of this user: their names, kinds and ages, and what is wrong with a file.

    These are the keys of files; credentials of a service and nvme-cli's file are not listed.

    Examples:
        dlfs key list
        dlfs key list --json
    """
    from dlfs.fabric.keys import key_directory, list_keys

    found = list_keys()
    if json:
        print_json(
            {
                "directory": str(key_directory()),
                "keys": [
                    {
                        "directory": str(one.directory),
                        "name": one.name,
                        "kind": one.kind,
                        "bits": one.bits,
                        "modified": datetime.fromtimestamp(one.modified_s, UTC),
                        "problem": one.problem or None,
                    }
                    for one in found
                ],
            }
        )
        return
    if not found:
        note(f"no key is in {key_directory()}")
        return
    rows = Table("name", "kind", "bits", "modified", "directory", "problem", right=("bits",))
    for one in found:
        modified = human_date(datetime.fromtimestamp(one.modified_s, UTC))
        rows.add_row(
            one.name,
            one.kind or "-",
            str(one.bits or "-"),
            modified,
            str(one.directory),
            one.problem,
        )
    print_data(rows)


def identity(
    name: _NameArgument,
    subsystem: Annotated[str, typer.Option("--subsystem", "-n", metavar="NQN")],
    hostnqn: Annotated[str | None, typer.Option(metavar="NQN")] = None,
) -> None:
    """Print the identities that name a TLS key in a handshake; they are no secret.

    libdlfs offers them in this order. A keyring that is filled by hand needs the first.

    Args:
        subsystem: NQN of the subsystem.
        hostnqn: NQN of the host; by default this one's.

    Examples:
        dlfs key identity psk -n nqn.2024-01.org.example:a
    """
    from dlfs.block.host import host_nqn
    from dlfs.fabric.keys import read_key
    from dlfs.fabric.tls_identity import VERSIONS, tls_identity

    text = read_key(name)
    for version in VERSIONS:
        print(tls_identity(text, hostnqn or host_nqn(), subsystem, version=version))


add_verb(app, "generate", generate)
add_verb(app, "import", import_)
add_verb(app, "list", list_)
add_verb(app, "identity", identity)
