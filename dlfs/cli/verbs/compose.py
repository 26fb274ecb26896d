"""``dlfs compose``: creates, exports, resizes and withdraws namespaces on storage nodes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlfs.base.units import parse_bytes
from dlfs.cli.options import JsonOption, confirm
from dlfs.cli.output import Table, human_size, note, print_data, print_json, result_of_change
from dlfs.cli.verb import add_verb, make_group
from dlfs.cli.verbs.target import (
    AddressOption,
    AllowOption,
    DiscoveryPortOption,
    NqnOption,
    PortOption,
)
from dlfs.errors import UsageError

if TYPE_CHECKING:
    from dlfs.fabric.composing import ComposedNamespace

app = make_group("Create, resize and withdraw namespaces on storage nodes.")

TargetOption = Annotated[
    str,
    typer.Option(
        "--target",
        "-t",
        metavar="TARGET",
        help="nvmet, nvmet+ssh://root@HOST, spdk, spdk:SOCKET or spdk://IP:PORT.",
    ),
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the namespace.")]


def create(
    name: NameArgument,
    size: Annotated[str, typer.Option("--size", "-s")],
    store: Annotated[str, typer.Option()],
    address: AddressOption,
    allow: AllowOption,
    target: TargetOption = "nvmet",
    nqn: NqnOption = "",
    port: PortOption = 4420,
    discovery_port: DiscoveryPortOption = 8009,
    dhchap_key: Annotated[str, typer.Option(metavar="NAME")] = "",
    dhchap_ctrl_key: Annotated[str, typer.Option(metavar="NAME")] = "",
    tls_psk: Annotated[str, typer.Option(metavar="NAME")] = "",
    json: JsonOption = False,
) -> None:
    r"""Create a namespace and export it, and print its URI.

    If it exists already, its hosts become those of --allow. After a restart of the storage node,
    the same command exports it again, with its bytes.

    Args:
        size: Such as 64GiB.
        store: Folder of the storage node; on SPDK, one of this machine, or an lvol store's name.
        dhchap_key: Key that hosts must prove to have.
        dhchap_ctrl_key: Key that the target proves to have.
        tls_psk: Key that encrypts connections; SPDK only.

    Examples:
        dlfs compose create a --size 64GiB --store /srv/nvme \
            -a 10.0.0.11 --allow nqn.2024-01.org.example:trainer
    """
    from dlfs.fabric.composing import NamespaceRequest, open_target

    request = NamespaceRequest(
        name=name,
        size_bytes=parse_bytes(size),
        store=store,
        address=address,
        allowed_hosts=tuple(allow),
        nqn=nqn,
        port=port,
        discovery_port=discovery_port,
        dhchap_key=dhchap_key,
        dhchap_ctrl_key=dhchap_ctrl_key,
        tls_psk=tls_psk,
    )
    with open_target(target) as opened:
        made = opened.create(request)
    if json:
        print_json({**_plain(made), "uri": made.uri + request.key_options}, result=True)
        return
    with result_of_change():
        print(made.uri + request.key_options)
    note(f"{made.name}: {human_size(made.size_bytes)} in {made.backing}")


def ls(target: TargetOption = "nvmet", json: JsonOption = False) -> None:
    """List the namespaces that were composed on a target.

    Examples:
        dlfs compose ls
        dlfs compose ls -t nvmet+ssh://root@10.0.0.11 --json
    """
    from dlfs.fabric.composing import open_target

    with open_target(target) as opened:
        found = opened.list()
    if json:
        print_json({"namespaces": [_plain(each) for each in found]})
        return
    table = Table("name", "size", "hosts", "device", right=("size", "hosts"))
    for each in found:
        table.add_row(
            each.name, human_size(each.size_bytes), str(len(each.allowed_hosts)), each.uri or "-"
        )
    print_data(table)


def resize(
    name: NameArgument,
    size: Annotated[str, typer.Argument(metavar="SIZE")],
    target: TargetOption = "nvmet",
    shrink: Annotated[bool, typer.Option("--shrink")] = False,
    json: JsonOption = False,
) -> None:
    """Change the size of a composed namespace while hosts use it.

    Args:
        size: New size, such as 128GiB.
        shrink: Allow a smaller size: the bytes behind it are lost.

    Examples:
        dlfs compose resize a 128GiB -t spdk
    """
    from dlfs.fabric.composing import open_target

    with open_target(target) as opened:
        made = opened.resize(name, parse_bytes(size), shrink=shrink)
    if json:
        print_json(_plain(made), result=True)
    note(f"{made.name}: {human_size(made.size_bytes)}")


def withdraw(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...")] = None,
    target: TargetOption = "nvmet",
    all_: Annotated[bool, typer.Option("--all")] = False,
    delete: Annotated[bool, typer.Option("--delete")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y")] = False,
    json: JsonOption = False,
) -> None:
    """End the export of composed namespaces: their hosts lose them at once.

    Args:
        names: Names of namespaces.
        all_: All that were composed.
        delete: Delete their bytes, too.
        yes: Do not ask.

    Examples:
        dlfs compose withdraw a
        dlfs compose withdraw --all --delete -t spdk
    """
    from dlfs.fabric.composing import open_target

    if bool(names) == all_:
        raise UsageError("withdraw: expected names or --all")
    with open_target(target) as opened:
        doomed = [each.name for each in opened.list()] if all_ else names or []
        if delete and doomed and not yes:
            confirm(
                f"Delete the bytes of {', '.join(doomed)}?",
                otherwise=f"withdraw {', '.join(doomed)}: expected --yes to delete the bytes",
                declined="nothing was withdrawn",
            )
        gone = []
        for name in doomed:
            gone.append(opened.withdraw(name, delete=delete))
            fate = "deleted" if delete else "kept"
            note(f"withdrew {name}; {fate} {gone[-1].backing}")
    if json:
        print_json({"withdrawn": [_plain(each) for each in gone]}, result=True)


def _plain(made: ComposedNamespace) -> dict[str, Any]:
    return {**asdict(made), "uri": made.uri}


add_verb(app, "create", create)
add_verb(app, "ls", ls)
add_verb(app, "resize", resize)
add_verb(app, "withdraw", withdraw)
