"""Discovery: lists the subsystems and namespaces of a storage node over NVMe/TCP.

``discover`` reads the log of a discovery controller, connects to every listed subsystem that
NVMe/TCP reaches, and lists its namespaces. It reads no data of a namespace.

- A referral is a record that names another discovery controller. It is followed once: the records
  of that controller are added, except for its own referrals.
- The addresses in a log are those that the target knows. If one does not answer, as behind a
  forwarded port, the discovery controller's host is tried with the record's port and with the
  discovery controller's port (Linux's target serves both on every port). A record with a wildcard
  address means the host of the discovery controller.
- Several records of one subsystem are several paths to it. The first that answers is used; the
  others follow in the URIs of its namespaces and are used when the first is lost.
- A subsystem that cannot be reached is listed with the reason: another transport, TLS for which no
  key is named, or other allowed hosts.

Limits: 1024 records of a log, 16 referrals, 256 subsystems with 1023 namespaces each, 4 paths, 8
addresses tried for one subsystem.

Threads: up to 16 threads query subsystems concurrently, so that the time-outs of those that do not
answer overlap.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import TypeVar

from dlfs.base.deadlines import own_deadline
from dlfs.base.threads import ThreadPool
from dlfs.block import NvmeTcpAssociation, NvmeTcpDiscoverUri, NvmeTcpUri, parse_uri
from dlfs.block.uri import PATHS_MAX
from dlfs.errors import DeviceError, DlfsError, FormatError, LimitError, NotFoundError, UsageError
from dlfs.fabric.identify import NamespaceInfo, list_namespaces
from dlfs.fabric.log_page import DiscoveryRecord, RecordKind, read_log

DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
REFERRALS_MAX = 16
SUBSYSTEMS_MAX = 256
TRIED_MAX = 8
"""Most addresses that are tried for one subsystem."""
AT_ONCE = 16
"""Most subsystems that are queried at the same time."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

Unusable = (DeviceError, NotFoundError, FormatError, LimitError)
"""Errors of one subsystem or namespace that do not end the discovery of others."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address at which an NVMe/TCP target listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class SubsystemInfo:
    """One subsystem that a log lists.

    Attributes:
        nqn: NQN of the subsystem.
        transports: transports that its records name.
        paths: addresses of the subsystem; the first has answered.
        namespaces: its active namespaces.
        problem: why its namespaces cannot be listed; None if they are.
    """

    nqn: str
    transports: tuple[str, ...]
    paths: tuple[Address, ...]
    namespaces: tuple[NamespaceInfo, ...]
    problem: str | None


@dataclass(frozen=True, slots=True)
class ReferralInfo:
    """Another discovery controller that a log names.

    Attributes:
        address: its address as text of the log.
        problem: why its log could not be read; None if it was.
    """

    address: str
    problem: str | None


@dataclass(frozen=True, slots=True)
class Discovery:
    """The content of a discovery controller's log.

    Attributes:
        address: address of the controller.
        subsystems: listed subsystems, in the order of the log.
        referrals: other discovery controllers, in the order of the log.
    """

    address: Address
    subsystems: tuple[SubsystemInfo, ...]
    referrals: tuple[ReferralInfo, ...]


def discover(request: NvmeTcpDiscoverUri) -> Discovery:
    """Read a discovery controller's log and list the namespaces of its subsystems.

    Args:
        request: address of the controller, and options of all connections.

    Raises:
        DeviceError: the controller cannot be reached or refuses this host.
        NotFoundError: there is no such host, or no discovery controller.
        FormatError: the log has an unknown format.
        LimitError: the log has too many records or subsystems.
    """
    here, listed, referrals = _read_logs(request)
    return Discovery(here, tuple(_subsystems(request, listed)), referrals)


def list_paths(request: NvmeTcpDiscoverUri) -> dict[str, list[Address]]:
    """Read a discovery controller's log; return addresses by subsystem NQN, at least one of each.

    Raises:
        DlfsError: as ``discover``.
    """
    _, listed, _ = _read_logs(request)
    found = {nqn: _candidates(request, records) for nqn, records in _by_nqn(listed).items()}
    return {nqn: [*first, *others] for nqn, (first, others) in found.items() if first or others}


_Listed = list[tuple[DiscoveryRecord, Address]]
"""Records, and the controller that listed each."""


def _by_nqn(listed: _Listed) -> dict[str, _Listed]:
    """Group the records of subsystems by NQN."""
    found: dict[str, _Listed] = {}
    for record, source in listed:
        if record.kind is RecordKind.SUBSYSTEM:
            found.setdefault(record.subsystem_nqn, []).append((record, source))
    return found


def _read_logs(
    request: NvmeTcpDiscoverUri,
) -> tuple[Address, _Listed, tuple[ReferralInfo, ...]]:
    """Return the address of a controller, the records of its log and referrals, and these."""
    here = Address(request.host, request.port)
    _, records = _read_log_at(request, [here])
    listed = [(record, here) for record in records]
    referrals: dict[Address | str, ReferralInfo] = {}
    for record in records:
        if record.kind is not RecordKind.REFERRAL:
            continue
        address = _parse_address(record)
        if address == here or (address or record.address) in referrals:
            continue
        info, further = _follow(request, record, len(referrals))
        referrals[address or record.address] = info
        listed += further
    return here, listed, tuple(referrals.values())


def _follow(
    request: NvmeTcpDiscoverUri, record: DiscoveryRecord, followed: int
) -> tuple[ReferralInfo, _Listed]:
    """Read the log of the discovery controller that a referral names."""
    name = f"{record.address} {record.service_id}"
    here = Address(request.host, request.port)
    problem = _why_unreachable(request, [record])
    if problem is None and followed >= REFERRALS_MAX:
        problem = f"only {REFERRALS_MAX} referrals are followed"
    if problem is not None:
        return ReferralInfo(name, problem), []
    try:
        there, records = _read_log_at(request, _candidates(request, [(record, here)])[0])
    except Unusable as error:
        return ReferralInfo(name, str(error)), []
    return ReferralInfo(name, None), [(found, there) for found in records]


def _read_log_at(
    request: NvmeTcpDiscoverUri, addresses: Sequence[Address]
) -> tuple[Address, list[DiscoveryRecord]]:
    association, address = _connect(request, addresses, DISCOVERY_NQN)
    with association:
        return address, read_log(association, str(address))


def read_paths(
    association: NvmeTcpAssociation, request: NvmeTcpDiscoverUri
) -> dict[str, list[Address]]:
    """Read the log of a connected discovery controller; return addresses by subsystem NQN.

    Raises:
        DeviceError: the controller was lost or refuses to answer.
        FormatError: the log has an unknown format.
        LimitError: the log has too many records.
    """
    here = Address(request.host, request.port)
    listed = [(record, here) for record in read_log(association, str(here))]
    return {nqn: _candidates(request, found)[0] for nqn, found in _by_nqn(listed).items()}


def namespace_uri(
    request: NvmeTcpDiscoverUri, nqn: str, paths: Sequence[Address], *, nsid: int
) -> NvmeTcpUri:
    """Return the URI of a namespace.

    Args:
        request: the discovery that listed it; its options apply to the namespace too.
        nqn: NQN of its subsystem.
        paths: addresses of the subsystem, at least one; the first four are used.
        nsid: namespace ID.
    """
    (host, port), *others = [(path.host, path.port) for path in paths[:PATHS_MAX]]
    return NvmeTcpUri(host, port, nqn, nsid, request.options, tuple(others))


# ---- subsystems ----------------------------------------------------------------------------------


def _subsystems(request: NvmeTcpDiscoverUri, listed: _Listed) -> list[SubsystemInfo]:
    by_nqn = _by_nqn(listed)
    if len(by_nqn) > SUBSYSTEMS_MAX:
        raise LimitError(
            f"discover at {request.host}: expected at most {SUBSYSTEMS_MAX} subsystems, "
            f"got {len(by_nqn)}"
        )
    return all_at_once(lambda nqn: _describe(request, nqn, by_nqn[nqn]), list(by_nqn))


def _describe(request: NvmeTcpDiscoverUri, nqn: str, found: _Listed) -> SubsystemInfo:
    records = [record for record, _ in found]
    problem = _why_unreachable(request, records)
    paths: tuple[Address, ...] = ()
    namespaces: tuple[NamespaceInfo, ...] = ()
    if problem is None:
        try:
            paths, namespaces = _connect_and_list(request, nqn, found)
        except (*Unusable, UsageError) as error:
            problem = str(error)
    transports = tuple(dict.fromkeys(record.transport for record in records))
    return SubsystemInfo(nqn, transports, paths, namespaces, problem)


def _connect_and_list(
    request: NvmeTcpDiscoverUri, nqn: str, found: _Listed
) -> tuple[tuple[Address, ...], tuple[NamespaceInfo, ...]]:
    recorded, alternatives = _candidates(request, found)
    parse_uri(str(namespace_uri(request, nqn, recorded, nsid=1)))  # checks the record's NQN
    association, address = _connect(request, [*recorded, *alternatives][:TRIED_MAX], nqn)
    with association:
        namespaces = list_namespaces(association, f"{address}/{nqn}")
    # Addresses before this one did not answer. Alternatives are not used if a recorded one answers.
    others = recorded[recorded.index(address) + 1 :] if address in recorded else []
    return (address, *others), tuple(namespaces)


def _why_unreachable(request: NvmeTcpDiscoverUri, records: Sequence[DiscoveryRecord]) -> str | None:
    """Return why this initiator cannot reach a subsystem over NVMe/TCP; None if it may."""
    over_tcp = [record for record in records if record.transport == "tcp"]
    if not over_tcp:
        names = ", ".join(dict.fromkeys(record.transport for record in records))
        return f"reached by {names} only, not by tcp"
    if not _encrypts(request) and all(record.secure_channel for record in over_tcp):
        return (
            "accepts only connections with TLS 1.3: name a key for them with tls_psk, or generate "
            "one with concat=1"
        )
    if not any(_parse_address(record) for record in over_tcp):
        return f"{over_tcp[0].address} {over_tcp[0].service_id} is no address of NVMe/TCP"
    return None


def _encrypts(request: NvmeTcpDiscoverUri) -> bool:
    """Return True if connections are encrypted, with a named key or with a generated one."""
    return request.options.tls_psk is not None or request.options.concat


def _parse_address(record: DiscoveryRecord) -> Address | None:
    """Return the address of an NVMe/TCP record; None for other transports and invalid addresses."""
    if record.transport != "tcp":
        return None
    digits = record.service_id
    try:
        host = str(ipaddress.ip_address(record.address))
    except ValueError:
        return None
    if not (digits.isdigit() and len(digits) <= 5 and 1 <= int(digits) <= 65535):
        return None
    return Address(host, int(digits))


def _candidates(request: NvmeTcpDiscoverUri, found: _Listed) -> tuple[list[Address], list[Address]]:
    """Return the recorded addresses of a subsystem, and alternatives to try if none answers."""
    encrypts = _encrypts(request)
    recorded: dict[Address, None] = {}
    alternatives: dict[Address, None] = {}
    for record, source in found:
        address = _parse_address(record)
        if address is None or (record.secure_channel and not encrypts):
            continue
        here = Address(source.host, address.port)
        if ipaddress.ip_address(address.host).is_unspecified:
            address = here
        recorded[address] = None
        alternatives |= {here: None, source: None}
    return list(recorded), [address for address in alternatives if address not in recorded]


def all_at_once(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Apply a function that waits for the network to items, up to 16 at the same time."""
    if len(items) < 2:
        return [function(item) for item in items]
    contexts = [copy_context() for _ in items]  # with the deadline of the caller

    def apply(item: _Item) -> _Result:
        with own_deadline():
            return function(item)

    with ThreadPool(min(len(items), AT_ONCE)) as pool:
        return list(pool.map(lambda context, item: context.run(apply, item), contexts, items))


# ---- connecting ----------------------------------------------------------------------------------


def _connect(
    request: NvmeTcpDiscoverUri, addresses: Sequence[Address], nqn: str
) -> tuple[NvmeTcpAssociation, Address]:
    """Connect to a subsystem at the first address that answers for it."""
    errors: list[DlfsError] = []
    for address in addresses:
        try:
            return NvmeTcpAssociation([(address.host, address.port)], nqn, request.options), address
        except Unusable as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    recorded = "; ".join(str(error) for error in errors)
    raise DeviceError(f"connect to {nqn}: nothing answers for it: {recorded}") from errors[0]
