"""Discovery: what a storage node offers, asked of its discovery controller over NVMe/TCP.

``discover`` reads the controller's log, connects to every subsystem in it that NVMe/TCP reaches,
and lists its namespaces. Nothing of a namespace is read: what is on it is for the layers above.

- A referral, a record that names another discovery controller, is followed once: what that one
  lists is taken as if it stood here, its own referrals are not followed.
- A log's addresses are those that the target knows. Where one does not answer, as behind a
  forwarded port, the host that was asked is tried with the record's port, and with the port that
  was asked (every port of Linux's target serves both). Records that tell a wildcard address mean
  the host that was asked.
- Several records of one subsystem are several paths to it. The first that answers is used, the
  others stand behind it in the URIs of its namespaces, for when it is lost.
- What cannot be reached is listed with the reason: subsystems for other transports, or that let
  only encrypted connections in, or other hosts than this one.

Limits: 1024 records of a log, 16 referrals, 256 subsystems with 1023 namespaces each, 4 paths, 8
addresses tried for one subsystem.

Threads: subsystems are looked into at the same time, up to 16, so that those that do not answer
cost their time together.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from dlfs.block import NvmeTcpAssociation, NvmeTcpDiscoverUri, NvmeTcpUri, parse_uri
from dlfs.block.uri import PATHS_MAX
from dlfs.errors import DeviceError, DlfsError, FormatError, LimitError, NotFoundError, UsageError
from dlfs.fabric.identify import NamespaceInfo, list_namespaces
from dlfs.fabric.log_page import DiscoveryRecord, RecordKind, read_log

DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
REFERRALS_MAX = 16
SUBSYSTEMS_MAX = 256
TRIED_MAX = 8
"""Addresses of one subsystem."""
AT_ONCE = 16

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

Unusable = (DeviceError, NotFoundError, FormatError, LimitError)
"""What is wrong with one subsystem or namespace, while others may be well."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where an NVMe/TCP target listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class SubsystemInfo:
    """One subsystem that a log lists.

    Attributes:
        nqn: its name.
        transports: that its records name.
        paths: where it can be reached; the first has answered.
        namespaces: its active ones.
        problem: why there are none to list; None where they are listed.
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
        address: as the log writes it.
        problem: why what it lists is missing; None where it was read.
    """

    address: str
    problem: str | None


@dataclass(frozen=True, slots=True)
class Discovery:
    """What a discovery controller lists.

    Attributes:
        address: of the controller.
        subsystems: in the order of the log.
        referrals: likewise.
    """

    address: Address
    subsystems: tuple[SubsystemInfo, ...]
    referrals: tuple[ReferralInfo, ...]


def discover(asked: NvmeTcpDiscoverUri) -> Discovery:
    """Ask a discovery controller what there is.

    Args:
        asked: where it is, and how to connect to it and to what it lists.

    Raises:
        DeviceError: it cannot be reached, or refuses.
        NotFoundError: there is no such host, or no discovery controller.
        FormatError: its log has a form that this code does not know.
        LimitError: its log has too many records or subsystems.
    """
    here = Address(asked.host, asked.port)
    _, records = _read_log_at(asked, [here])
    listed = [(record, here) for record in records]
    referrals: dict[Address | str, ReferralInfo] = {}
    for record in records:
        if record.kind is not RecordKind.REFERRAL:
            continue
        address = _parse_address(record)
        if address == here or (address or record.address) in referrals:
            continue
        info, further = _follow(asked, record, len(referrals))
        referrals[address or record.address] = info
        listed += further
    return Discovery(here, tuple(_subsystems(asked, listed)), tuple(referrals.values()))


_Listed = list[tuple[DiscoveryRecord, Address]]
"""Records, and the controller that listed each."""


def _follow(
    asked: NvmeTcpDiscoverUri, record: DiscoveryRecord, followed: int
) -> tuple[ReferralInfo, _Listed]:
    """What a referral leads to."""
    name = f"{record.address} {record.service_id}"
    here = Address(asked.host, asked.port)
    problem = _why_unreachable([record])
    if problem is None and followed >= REFERRALS_MAX:
        problem = f"only {REFERRALS_MAX} referrals are followed"
    if problem is not None:
        return ReferralInfo(name, problem), []
    try:
        there, records = _read_log_at(asked, _candidates([(record, here)])[0])
    except Unusable as error:
        return ReferralInfo(name, str(error)), []
    return ReferralInfo(name, None), [(found, there) for found in records]


def _read_log_at(
    asked: NvmeTcpDiscoverUri, addresses: Sequence[Address]
) -> tuple[Address, list[DiscoveryRecord]]:
    association, address = _connect(asked, addresses, DISCOVERY_NQN)
    with association:
        return address, read_log(association, str(address))


def namespace_uri(
    asked: NvmeTcpDiscoverUri, nqn: str, paths: Sequence[Address], *, nsid: int
) -> NvmeTcpUri:
    """The URI of a namespace.

    Args:
        asked: the discovery that listed it, whose options hold for the namespace too.
        nqn: of its subsystem.
        paths: to it, at least one; four are kept.
        nsid: its number.
    """
    (host, port), *others = [(path.host, path.port) for path in paths[:PATHS_MAX]]
    return NvmeTcpUri(host, port, nqn, nsid, asked.options, tuple(others))


# ---- subsystems ----------------------------------------------------------------------------------


def _subsystems(asked: NvmeTcpDiscoverUri, listed: _Listed) -> list[SubsystemInfo]:
    by_nqn: dict[str, _Listed] = {}
    for record, source in listed:
        if record.kind is RecordKind.SUBSYSTEM:
            by_nqn.setdefault(record.subsystem_nqn, []).append((record, source))
    if len(by_nqn) > SUBSYSTEMS_MAX:
        raise LimitError(
            f"discover at {asked.host}: expected at most {SUBSYSTEMS_MAX} subsystems, "
            f"got {len(by_nqn)}"
        )
    return all_at_once(lambda nqn: _describe(asked, nqn, by_nqn[nqn]), list(by_nqn))


def _describe(asked: NvmeTcpDiscoverUri, nqn: str, found: _Listed) -> SubsystemInfo:
    records = [record for record, _ in found]
    problem = _why_unreachable(records)
    paths: tuple[Address, ...] = ()
    namespaces: tuple[NamespaceInfo, ...] = ()
    if problem is None:
        try:
            paths, namespaces = _look_into(asked, nqn, found)
        except (*Unusable, UsageError) as error:
            problem = str(error)
    transports = tuple(dict.fromkeys(record.transport for record in records))
    return SubsystemInfo(nqn, transports, paths, namespaces, problem)


def _look_into(
    asked: NvmeTcpDiscoverUri, nqn: str, found: _Listed
) -> tuple[tuple[Address, ...], tuple[NamespaceInfo, ...]]:
    told, guessed = _candidates(found)
    parse_uri(str(namespace_uri(asked, nqn, told, nsid=1)))  # is the record's text that of an NQN?
    association, address = _connect(asked, [*told, *guessed][:TRIED_MAX], nqn)
    with association:
        namespaces = list_namespaces(association, f"{address}/{nqn}")
    # What was tried before it did not answer. A guess is worth nothing where a record is right.
    others = told[told.index(address) + 1 :] if address in told else []
    return (address, *others), tuple(namespaces)


def _why_unreachable(records: Sequence[DiscoveryRecord]) -> str | None:
    """Why NVMe/TCP, as this initiator speaks it, does not reach a subsystem; None: it may."""
    over_tcp = [record for record in records if record.transport == "tcp"]
    if not over_tcp:
        names = ", ".join(dict.fromkeys(record.transport for record in records))
        return f"reached by {names} only, not by tcp"
    if all(record.secure_channel for record in over_tcp):
        return "lets only encrypted connections in"
    if not any(_parse_address(record) for record in over_tcp):
        return f"{over_tcp[0].address} {over_tcp[0].service_id} is no address of NVMe/TCP"
    return None


def _parse_address(record: DiscoveryRecord) -> Address | None:
    """What a record of NVMe/TCP names; None where it is another's, or names nothing."""
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


def _candidates(found: _Listed) -> tuple[list[Address], list[Address]]:
    """Where to try: what the records tell, and what may be meant instead."""
    told: dict[Address, None] = {}
    guessed: dict[Address, None] = {}
    for record, source in found:
        address = _parse_address(record)
        if address is None or record.secure_channel:
            continue
        here = Address(source.host, address.port)
        if ipaddress.ip_address(address.host).is_unspecified:
            address = here
        told[address] = None
        guessed |= {here: None, source: None}
    return list(told), [address for address in guessed if address not in told]


def all_at_once(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Apply a function that waits for the network to items, up to 16 at the same time."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(len(items), AT_ONCE)) as pool:
        return list(pool.map(function, items))


# ---- connecting ----------------------------------------------------------------------------------


def _connect(
    asked: NvmeTcpDiscoverUri, addresses: Sequence[Address], nqn: str
) -> tuple[NvmeTcpAssociation, Address]:
    """Connect to a subsystem at the first address that answers for it."""
    errors: list[DlfsError] = []
    for address in addresses:
        try:
            return NvmeTcpAssociation([(address.host, address.port)], nqn, asked.options), address
        except Unusable as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    told = "; ".join(str(error) for error in errors)
    raise DeviceError(f"connect to {nqn}: nothing answers for it: {told}") from errors[0]
