"""``dlfs discover``: lists the namespaces of a storage node, and the volumes they belong to."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlfs.cli.options import JsonOption
from dlfs.cli.output import Table, human_size, note, print_data, print_json

if TYPE_CHECKING:
    from dlfs.fabric.discovery import Discovery, SubsystemInfo
    from dlfs.store.discovered import FoundNamespace


def discover(
    host: Annotated[str, typer.Argument(metavar="HOST[:PORT]")],
    hostnqn: Annotated[str | None, typer.Option(metavar="NQN")] = None,
    dhchap_key: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    dhchap_ctrl_key: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    tls_psk: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    concat: Annotated[bool, typer.Option("--concat")] = False,
    json: JsonOption = False,
) -> None:
    """List the subsystems and namespaces of a storage node, and the volumes they belong to.

    Args:
        host: Address of its discovery controller; IPv6 in brackets.
        hostnqn: Host NQN to connect with, which the target may filter by.
        dhchap_key: Key with which this host authenticates.
        dhchap_ctrl_key: Key that the node must prove to have.
        tls_psk: Key with which connections are encrypted.
        concat: Encrypt connections with a key that authentication generates.

    Examples:
        dlfs discover 10.0.0.11
        dlfs discover storage-a:8009 --json
        dlfs discover storage-a --tls-psk psk
    """
    from dlfs.block import NvmeTcpDiscoverUri, parse_uri
    from dlfs.fabric import discovery
    from dlfs.store.discovered import find_namespaces

    given = {
        "hostnqn": hostnqn,
        "dhchap_key": dhchap_key,
        "dhchap_ctrl_key": dhchap_ctrl_key,
        "tls_psk": tls_psk,
        "concat": "1" if concat else None,
    }
    query = "&".join(f"{name}={value}" for name, value in given.items() if value)
    asked = parse_uri(f"nvme-tcp+discover://{host}{'?' if query else ''}{query}")
    assert isinstance(asked, NvmeTcpDiscoverUri)
    found = discovery.discover(asked)
    namespaces = find_namespaces([(asked, found)])
    if json:
        print_json(_discovery_json(found, namespaces))
        return
    if namespaces:
        print_data(_table(namespaces))
    else:
        note(f"{found.address} lists no namespace for {hostnqn or 'this host'}")
    _tell_problems(found, namespaces)


def _table(namespaces: list[FoundNamespace]) -> Table:
    titles = ("size", "block", "volume", "member", "device")
    made = Table(*titles, right=("size", "block", "member"), drop=("block",))
    for found in namespaces:
        member = found.content.superblock
        volume, number = "-", "-"
        if member is not None:
            volume = f"{member.volume_uuid} {member.label}".rstrip()
            number = f"{member.member_number} of {member.geometry.member_count}"
        size, block = found.namespace.size_bytes, found.namespace.block_bytes
        made.add_row(human_size(size), human_size(block), volume, number, found.uri)
    return made


def _tell_problems(found: Discovery, namespaces: list[FoundNamespace]) -> None:
    from dlfs.store.discovered import discovery_problems

    for problem in discovery_problems(found):
        note(problem)
    for namespace in namespaces:
        if namespace.content.problem is not None and not namespace.content.foreign:
            note(namespace.content.problem)


# ---- JSON ----------------------------------------------------------------------------------------


def _discovery_json(found: Discovery, namespaces: list[FoundNamespace]) -> dict[str, Any]:
    return {
        "address": str(found.address),
        "subsystems": [_subsystem_json(each, namespaces) for each in found.subsystems],
        "referrals": [asdict(referral) for referral in found.referrals],
    }


def _subsystem_json(subsystem: SubsystemInfo, namespaces: list[FoundNamespace]) -> dict[str, Any]:
    own = [found for found in namespaces if found.subsystem is subsystem]
    return {
        "nqn": subsystem.nqn,
        "transports": subsystem.transports,
        "paths": [str(path) for path in subsystem.paths],
        "problem": subsystem.problem,
        "namespaces": [_namespace_json(found) for found in own],
    }


def _namespace_json(found: FoundNamespace) -> dict[str, Any]:
    member = found.content.superblock
    return {
        **asdict(found.namespace),
        "uri": found.uri,
        "volume": None
        if member is None
        else {
            "uuid": member.volume_uuid,
            "label": member.label,
            "generation": member.generation,
            "member": member.member_number,
            "member_count": member.geometry.member_count,
        },
        "problem": found.content.problem,
    }
