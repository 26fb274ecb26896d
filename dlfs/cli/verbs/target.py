"""``dlfs target``: what a storage node's own target has to be told.

DLFS does not run on storage nodes; ``dlfs target recipe`` prints what a person runs there, and
``dlfs target hostnqn`` which host it has to allow.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from dlfs.cli.output import note
from dlfs.cli.verb import VerbGroup, add_verb

app = typer.Typer(cls=VerbGroup, rich_markup_mode=None)

_NEXT = {
    "nvmet": "on the storage node, as root: sh export.sh start (then verify, undo)",
    "nvmetcli": "on the storage node, as root: nvmetcli restore FILE replaces all that it exports; "
    "verify: nvmetcli ls; undo: nvmetcli clear",
    "spdk": "on the storage node, where nvmf_tgt runs: sh export.sh start (then verify, undo)",
}


class Kind(StrEnum):
    """Of targets; the names of ``dlfs.fabric.recipes.RECIPES``."""

    NVMET = "nvmet"
    NVMETCLI = "nvmetcli"
    SPDK = "spdk"


@app.callback()
def target() -> None:
    """Recipes for storage nodes, which run a stock target."""


def recipe(
    device: Annotated[
        str,
        typer.Argument(metavar="DEVICE", help="On the storage node: a disk or file, absolute."),
    ],
    address: Annotated[
        str,
        typer.Option(
            "--address", "-a", metavar="IP", help="Of the storage node, as trainers see it."
        ),
    ],
    allow: Annotated[
        list[str],
        typer.Option("--allow", metavar="HOSTNQN", help="A host that may connect; repeat it."),
    ],
    kind: Annotated[
        Kind,
        typer.Option(
            "--kind",
            "-k",
            metavar="nvmet|nvmetcli|spdk",
            help="The target: Linux's (script, JSON) or SPDK's.",
        ),
    ] = Kind.NVMET,
    nqn: Annotated[
        str, typer.Option(metavar="NQN", help="Of the subsystem; one is made if not given.")
    ] = "",
    port: Annotated[int, typer.Option(help="TCP port of the data.")] = 4420,
    discovery_port: Annotated[int, typer.Option(help="TCP port of discovery.")] = 8009,
) -> None:
    """Print how to export DEVICE from a storage node: start, verify, undo."""
    from dlfs.fabric.recipes import RECIPES, Export

    export = Export(
        device=device,
        address=address,
        allowed_hosts=tuple(allow),
        nqn=nqn,
        port=port,
        discovery_port=discovery_port,
    )
    print(RECIPES[kind](export), end="")
    note(_NEXT[kind])


def hostnqn() -> None:
    """Print what this machine calls itself: the NQN that a storage node must allow."""
    from dlfs.block.host import host_nqn

    print(host_nqn())


add_verb(app, "recipe", recipe)
add_verb(app, "hostnqn", hostnqn)
