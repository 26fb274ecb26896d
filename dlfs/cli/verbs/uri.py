"""``dlfs uri``: explains device URIs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from dlfs.cli.options import JsonOption
from dlfs.cli.output import print_json, print_text


def uri(
    text: Annotated[str | None, typer.Argument(metavar="[URI]")] = None,
    json: JsonOption = False,
) -> None:
    """Explain device URIs: the parts of VOLUME arguments.

    Args:
        text: Explain this URI instead.

    Examples:
        dlfs uri
        dlfs uri nvme-tcp://10.0.0.5/nqn.2024-01.org.example:a
    """
    if text is None:
        _explain_all(json)
    else:
        _explain(text, json)


def _explain_all(json: bool) -> None:
    from dlfs.block import describe_schemes

    schemes = describe_schemes()
    if json:
        # Earlier releases listed schemes that they could not open.
        print_json({"schemes": [asdict(scheme) | {"available": True} for scheme in schemes]})
        return
    print_text(
        "A volume is one or more devices: URI,URI,... To read or mount one that a service has, "
        "name its socket instead: unix:PATH.\n"
    )
    for scheme in schemes:
        print_text(scheme.scheme, style="bold cyan")
        for line in (scheme.summary, scheme.form, f"e.g. {scheme.example}"):
            print_text(line, indent=4)
        print()


def _explain(text: str, json: bool) -> None:
    from dlfs.block import parse_uri, split_members

    members = [parse_uri(member) for member in split_members(text)]
    if json:
        print_json(
            {"members": [{"uri": str(m), "kind": type(m).__name__, **asdict(m)} for m in members]}
        )
        return
    for member in members:
        print_text(str(member), style="bold cyan")
        for name, value in _plain(asdict(member)):
            print_text(f"{name} = {value}", indent=4)


def _plain(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields of a URI and of its options, with readable values."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _plain(value)
        elif isinstance(value, bool):
            yield name.replace("_", " "), "yes" if value else "no"
        else:
            items = value if isinstance(value, tuple) else [] if value is None else [value]
            yield name.replace("_", " "), ", ".join(map(str, items)) or "-"
