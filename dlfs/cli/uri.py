"""``dlfs uri``: help on device URIs, and what one means."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from dlfs.cli.options import JsonOption
from dlfs.cli.output import print_json, stdout_console


def uri(
    text: Annotated[
        str | None, typer.Argument(metavar="[URI]", help="Explain this one instead.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Explain device URIs: what VOLUME arguments are made of."""
    if text is None:
        _explain_all(json)
    else:
        _explain(text, json)


def _explain_all(json: bool) -> None:
    from dlfs.block import describe_schemes

    schemes = describe_schemes()
    if json:
        print_json({"schemes": [asdict(scheme) for scheme in schemes]})
        return
    console = stdout_console()
    console.print("A volume is one or more devices: [bold]URI[/][dim],URI,...[/]\n")
    for scheme in schemes:
        later = "" if scheme.available else "  [yellow](a later release)[/]"
        console.print(f"[bold cyan]{scheme.scheme}[/]{later}")
        for line in (scheme.summary, scheme.form, f"e.g. {scheme.example}"):
            console.print(f"    {line}", markup=False, soft_wrap=True)
        console.print()


def _explain(text: str, json: bool) -> None:
    from dlfs.block import parse_uri, split_members

    members = [parse_uri(member) for member in split_members(text)]
    if json:
        print_json(
            {"members": [{"uri": str(m), "kind": type(m).__name__, **asdict(m)} for m in members]}
        )
        return
    console = stdout_console()
    for member in members:
        console.print(str(member), style="bold cyan", markup=False, soft_wrap=True)
        for name, value in asdict(member).items():
            console.print(f"    {name} = {value}", markup=False, soft_wrap=True)
