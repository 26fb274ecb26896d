"""``dlfs target``: prints the configuration of a storage node's own target.

DLFS does not run on storage nodes. ``dlfs target recipe`` prints the commands to run there, and
``dlfs target hostnqn`` the host to allow.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from dlfs.cli.output import note
from dlfs.cli.verb import add_verb, make_group

app = make_group("Print recipes for storage nodes, which run a standard target.")

# Options of an export, also those of 'dlfs compose create'.
AddressOption = Annotated[
    str,
    typer.Option("--address", "-a", metavar="IP", help="Address of the storage node for trainers."),
]
AllowOption = Annotated[
    list[str],
    typer.Option("--allow", metavar="HOSTNQN", help="A host that may connect; repeat it."),
]
NqnOption = Annotated[
    str, typer.Option(metavar="NQN", help="NQN of the subsystem; made up by default.")
]
PortOption = Annotated[int, typer.Option(help="TCP port of the data.")]
DiscoveryPortOption = Annotated[int, typer.Option(help="TCP port of discovery.")]

_NEXT = {
    "nvmet": "on the storage node, as root: sh export.sh start (then verify, undo)",
    "nvmetcli": "on the storage node, as root: nvmetcli restore FILE replaces all that it exports; "
    "verify: nvmetcli ls; undo: nvmetcli clear",
    "spdk": "on the storage node, where nvmf_tgt runs: sh export.sh start (then verify, undo)",
}


def recipe(
    device: Annotated[str, typer.Argument(metavar="DEVICE")],
    address: AddressOption,
    allow: AllowOption,
    kind: Annotated[
        Literal["nvmet", "nvmetcli", "spdk"],
        typer.Option("--kind", "-k", metavar="nvmet|nvmetcli|spdk"),
    ] = "nvmet",
    nqn: NqnOption = "",
    port: PortOption = 4420,
    discovery_port: DiscoveryPortOption = 8009,
    auth: Annotated[bool, typer.Option("--auth")] = False,
    tls: Annotated[bool, typer.Option("--tls")] = False,
) -> None:
    r"""Print how to export DEVICE from a storage node: start, verify, undo.

    Args:
        device: Disk or file on the storage node, absolute path.
        kind: The target: Linux's (script, JSON) or SPDK's.
        auth: Demand keys; /etc/dlfs/keys on the storage node has them.
        tls: Encrypt; /etc/dlfs/keys on the storage node has the keys.

    Examples:
        dlfs target recipe /dev/nvme1n1 -a 10.0.0.11 \
            --allow nqn.2024-01.org.example:trainer >export.sh
    """
    from dlfs.fabric.recipes import RECIPES, Export

    export = Export(
        device=device,
        address=address,
        allowed_hosts=tuple(allow),
        nqn=nqn,
        port=port,
        discovery_port=discovery_port,
        auth=auth,
        tls=tls,
    )
    print(RECIPES[kind](export), end="")
    note(_NEXT[kind])


def hostnqn() -> None:
    """Print the NQN of this machine, which a storage node must allow.

    Examples:
        dlfs target hostnqn
    """
    from dlfs.block.host import host_nqn

    print(host_nqn())


add_verb(app, "recipe", recipe)
add_verb(app, "hostnqn", hostnqn)
