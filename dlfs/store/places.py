"""Decides where members are looked for that a location record names, and nobody else does.

The record is on the devices of a volume (FORMAT.md, section 3.4), and whoever wrote a device chose
its URIs. Opening any URI would let a file on a USB stick make this process connect to a host, or a
storage node make a service of root open local paths. So a record is followed only to places like
those of the devices that are open, which the caller gave:

- to files in the same directory, by its given name or the one that its links lead to, and memory
  of this process that exists;
- to namespaces at a host of a given URI, with the options of that URI: keys, host NQN, timeouts;
- to subsystems that a discovery controller of the caller lists, at the addresses that it lists;
- through SPDK over TCP or RDMA, to the address of a given URI, with the options of that URI.

Devices that are opened so lie in places that were open before, so the rule may be applied to all
open devices, and no record leads further than another one. What the caller gave counts as long as
the volume is open, also when its members have moved on. Everything else must be given.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlfs.base.wording import quote
from dlfs.block import (
    BlockDevice,
    FileUri,
    MemoryDevice,
    MemoryUri,
    NvmeTcpDevice,
    NvmeTcpDiscoverUri,
    NvmeTcpUri,
    SpdkUri,
    format_path,
    parse_uri,
)
from dlfs.errors import NotFoundError, UsageError
from dlfs.fabric.discovery import Address, Unusable, all_at_once, list_paths, namespace_uri
from dlfs.store.members import Opener

DeviceUri = FileUri | MemoryUri | NvmeTcpUri | NvmeTcpDiscoverUri | SpdkUri


class RefusedError(NotFoundError):
    """A location record names a device that is not like any that the caller gave."""


@dataclass(frozen=True)
class GivenOpener:
    """Opens the devices of a volume, and knows what the caller gave, whatever its members are now.

    Args:
        opener: function that opens devices.
        given: URIs of devices and of discovery controllers that the caller gave.
        found: URIs of the devices that the controllers listed, which are noted on the devices.
    """

    opener: Opener
    given: tuple[str, ...]
    found: frozenset[str]

    def __call__(self, uri: str, *, writable: bool) -> BlockDevice:
        """Open the device that a URI names."""
        device = self.opener(uri, writable=writable)
        if isinstance(device, NvmeTcpDevice) and uri in self.found:
            device.discovery = tuple(self._controllers())
        return device

    def _controllers(self) -> dict[str, NvmeTcpDiscoverUri]:
        parsed = {uri: parse_uri(uri) for uri in self.given}
        return {uri: one for uri, one in parsed.items() if isinstance(one, NvmeTcpDiscoverUri)}

    def find(self, member: NvmeTcpUri) -> tuple[str, Opener] | None:
        """Return the URI of a namespace as the controllers list it now, and its opener, or None."""
        requests = list(self._controllers().values())
        logs = all_at_once(_list_paths, requests)
        for request, log in zip(requests, logs, strict=True):
            if paths := log.get(member.subsystem_nqn):
                uri = str(namespace_uri(request, member.subsystem_nqn, paths, nsid=member.nsid))
                return uri, replace(self, found=self.found | {uri})
        return None


def _list_paths(request: NvmeTcpDiscoverUri) -> dict[str, list[Address]]:
    try:
        return list_paths(request)
    except Unusable:
        return {}


def opener_for(given: Sequence[str], resolved: Sequence[str], opener: Opener) -> Opener:
    """Return the opener of a volume's devices.

    Args:
        given: URIs that the caller gave.
        resolved: the same, with found devices in place of the discovery controllers.
        opener: function that opens devices.
    """
    if isinstance(opener, GivenOpener):
        return opener  # of the caller that opened the volume first
    return GivenOpener(opener, tuple(given), frozenset(resolved) - frozenset(given))


def follow(recorded: str, places: Sequence[str], opener: Opener) -> tuple[str, Opener]:
    """Return the URI by which a recorded member is opened, and the opener for it.

    Args:
        recorded: URI of a location record.
        places: URIs of the devices that the caller gave, and of others that are open.
        opener: function that opens the volume's devices.

    Raises:
        RefusedError: the caller gave no device in a place like that.
    """
    try:
        wanted = parse_uri(recorded)
    except UsageError as error:
        raise refuse(recorded, "it is malformed") from error
    named = opener.given if isinstance(opener, GivenOpener) else ()
    given = [parse_uri(uri) for uri in (*places, *named)]
    if isinstance(wanted, NvmeTcpUri):
        uri = _at_known_host(wanted, given)
        if uri is not None:
            return uri, opener
        found = opener.find(wanted) if isinstance(opener, GivenOpener) else None
        if found is None:
            raise refuse(recorded, f"no given URI is of the host {quote(wanted.host)}")
        return found
    if isinstance(wanted, FileUri):
        return _in_known_directory(recorded, wanted, given), opener
    if isinstance(wanted, MemoryUri):
        if not MemoryDevice.exists(wanted.name):
            raise refuse(recorded, "this process has no such memory")
        return recorded, opener
    if isinstance(wanted, SpdkUri):
        return _at_known_address(recorded, wanted, given), opener
    raise refuse(recorded, "it names many devices")


def refuse(recorded: str, why: str) -> RefusedError:
    """Return the error for a recorded URI that is not followed."""
    return RefusedError(
        f"open {quote(recorded)}: a device of the volume names it, and it was not opened: {why}; "
        "if it is a member, add it to the URIs of the volume"
    )


def _host(name: str) -> str:
    """Return a host in the form in which equal hosts are equal."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name.lower()


def _at_known_host(wanted: NvmeTcpUri, given: Sequence[DeviceUri]) -> str | None:
    """Return a URI with the options of a given one, and the paths at hosts with the same keys.

    A host that has another key, or none, must not be asked to prove what this key proves.
    """
    known = [uri for uri in given if isinstance(uri, NvmeTcpUri | NvmeTcpDiscoverUri)]
    known.sort(key=lambda uri: getattr(uri, "subsystem_nqn", None) != wanted.subsystem_nqn)
    for uri in known:
        if any(_host(host) in _hosts(uri) for host, _ in wanted.paths):
            hosts = {
                host for other in known if _keys(other) == _keys(uri) for host in _hosts(other)
            }
            (host, port), *others = (path for path in wanted.paths if _host(path[0]) in hosts)
            nqn, nsid = wanted.subsystem_nqn, wanted.nsid
            return str(NvmeTcpUri(host, port, nqn, nsid, uri.options, tuple(others)))
    return None


def _keys(uri: NvmeTcpUri | NvmeTcpDiscoverUri) -> tuple[str | None, ...]:
    options = uri.options
    return options.dhchap_key, options.dhchap_ctrl_key, options.tls_psk


def _hosts(uri: NvmeTcpUri | NvmeTcpDiscoverUri) -> set[str]:
    names = [host for host, _ in uri.paths] if isinstance(uri, NvmeTcpUri) else [uri.host]
    return set(map(_host, names))


def _in_known_directory(recorded: str, wanted: FileUri, given: Sequence[DeviceUri]) -> str:
    path = os.path.abspath(wanted.path)
    directory = os.path.dirname(path)
    known = [
        os.path.dirname(os.path.abspath(uri.path)) for uri in given if isinstance(uri, FileUri)
    ]
    if directory not in known and directory not in map(os.path.realpath, known):
        raise refuse(recorded, f"no given file is in the directory {quote(directory)}")
    return format_path(path)  # without "..", which a link in the path could lead elsewhere


def _at_known_address(recorded: str, wanted: SpdkUri, given: Sequence[DeviceUri]) -> str:
    new = dict(wanted.transport_id)
    for uri in given:
        if not isinstance(uri, SpdkUri):
            continue
        old = dict(uri.transport_id)
        kind = old["trtype"].lower()
        if kind == new["trtype"].lower() != "pcie" and _host(old["traddr"]) == _host(new["traddr"]):
            old |= {key: new[key] for key in ("trsvcid", "subnqn") if key in new}
            return str(replace(uri, transport_id=tuple(old.items()), nsid=wanted.nsid))
    raise refuse(
        recorded,
        f"no given URI is of the SPDK address {quote(new['trtype'] + ' ' + new['traddr'])}",
    )
