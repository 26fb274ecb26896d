"""Finds the members of a volume among the namespaces that storage nodes list.

A ``nvme-tcp+discover:`` URI stands for every namespace that a discovery controller lists. Several
of them, one for each storage node, may be combined with URIs of single devices. Members are
identified by the UUIDs in their superblocks, independent of order and address. A device that cannot
be opened, or is no member of the volume, is ignored. If too many members are missing, the error
lists the ignored devices and the reasons.

A namespace that several controllers list is one namespace with several paths if it has the same
subsystem, number and identity.

Threads: up to 16 query controllers and open devices in parallel, so that the timeouts of failed
nodes overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from uuid import UUID

from dlfs.base.deadlines import OTHER_MEMBERS_PART, limit_device
from dlfs.block import NvmeTcpDiscoverUri, open_device, parse_uri
from dlfs.errors import AuthenticationError, DlfsError, FormatError, NotFoundError, UsageError
from dlfs.fabric.discovery import (
    Address,
    Discovery,
    SubsystemInfo,
    Unusable,
    all_at_once,
    discover,
    namespace_uri,
)
from dlfs.fabric.identify import NamespaceInfo
from dlfs.format.superblock import Superblock
from dlfs.store.members import Opener, SuperblockCopy, check_known, identify, read_copies

REASONS_MAX = 16
"""Most reasons in one error message."""


@dataclass(frozen=True, slots=True)
class DeviceContent:
    """The superblock of a device, or the reason why it has none.

    Attributes:
        superblock: newest superblock on it; None if it is no member of a volume.
        problem: reason why it is no member or is unreadable; None if it is a member.
        foreign: True if none of its bytes look like a superblock.
        unknown: its superblock copies that need a feature unknown to this code.
    """

    superblock: Superblock | None
    problem: str | None = None
    foreign: bool = False
    unknown: tuple[SuperblockCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class FoundNamespace:
    """A namespace that a discovery controller lists.

    Attributes:
        uri: URI of the device.
        subsystem: subsystem of the namespace.
        namespace: number, size and identity of the namespace.
        content: the superblock on it.
    """

    uri: str
    subsystem: SubsystemInfo
    namespace: NamespaceInfo
    content: DeviceContent


def find_namespaces(
    discoveries: Iterable[tuple[NvmeTcpDiscoverUri, Discovery]],
    *,
    opener: Opener = open_device,
) -> list[FoundNamespace]:
    """Open every namespace of some discoveries for reading and identify it.

    Args:
        discoveries: URIs and their discoveries; the options of a URI apply to its namespaces.
        opener: function that opens devices.
    """
    return all_at_once(lambda listed: _inspect(listed, opener), _listed(discoveries))


def resolve_uris(uris: Sequence[str], *, opener: Opener = open_device) -> tuple[str, ...]:
    """Replace the discovery URIs in a volume's member URIs by the members that they list.

    Args:
        uris: URIs of devices and of discovery controllers; returned as they are if there is no
            discovery URI.
        opener: function that opens devices.

    Returns:
        The URIs of single devices as given, then the discovered members, by number.

    Raises:
        AuthenticationError: every controller refused this host, or this host refused it.
        NotFoundError: no volume was found, or too many of its members are missing.
        UsageError: several volumes were found, and no argument chooses one.
        VersionError: a namespace has a generation of the volume that this code cannot read.
    """
    parsed = [parse_uri(uri) for uri in uris]
    controllers = [uri for uri in parsed if isinstance(uri, NvmeTcpDiscoverUri)]
    if not controllers:
        return tuple(uris)
    single = [u for u, p in zip(uris, parsed, strict=True) if not isinstance(p, NvmeTcpDiscoverUri)]
    with limit_device(OTHER_MEMBERS_PART):
        given = [_identify_uri(uri, opener) for uri in single]
    results = list(zip(controllers, all_at_once(_discover, controllers), strict=True))
    refusals = [result for _, result in results if isinstance(result, AuthenticationError)]
    if not single and len(refusals) == len(results):
        raise refusals[0]
    listed = [(uri, result) for uri, result in results if isinstance(result, Discovery)]
    with limit_device(OTHER_MEMBERS_PART):
        found = find_namespaces(listed, opener=opener)
    choice = _VolumeChoice(
        given=[content.superblock for content in given if content.superblock is not None],
        found=found,
        problems=[
            *(content.problem for content in given if content.problem is not None),
            *_problems((result for _, result in results), found),
        ],
    )
    members = choice.choose({uri.volume for uri in controllers if uri.volume is not None})
    return (*single, *(member.uri for member in members))


def _discover(uri: NvmeTcpDiscoverUri) -> Discovery | DlfsError:
    """Return the discovery of a controller, or the error."""
    try:
        return discover(uri)
    except Unusable as error:
        return error


# ---- namespaces ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Listed:
    controller: NvmeTcpDiscoverUri
    subsystem: SubsystemInfo
    namespace: NamespaceInfo
    paths: tuple[Address, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of the namespace, equal for all controllers that list it."""
        name = self.namespace.identity or self.paths
        return (self.subsystem.nqn, self.namespace.nsid, name)


def _listed(discoveries: Iterable[tuple[NvmeTcpDiscoverUri, Discovery]]) -> list[_Listed]:
    """Return every namespace once, with its paths from all controllers."""
    by_key: dict[tuple[object, ...], _Listed] = {}
    for controller, discovery in discoveries:
        for subsystem in discovery.subsystems:
            for namespace in subsystem.namespaces:
                found = _Listed(controller, subsystem, namespace, subsystem.paths)
                first = by_key.setdefault(found.key, found)
                paths = tuple(dict.fromkeys((*first.paths, *found.paths)))
                by_key[found.key] = _Listed(first.controller, first.subsystem, namespace, paths)
    return list(by_key.values())


def _inspect(listed: _Listed, opener: Opener) -> FoundNamespace:
    nqn, nsid = listed.subsystem.nqn, listed.namespace.nsid
    uri = str(namespace_uri(listed.controller, nqn, listed.paths, nsid=nsid))
    return FoundNamespace(uri, listed.subsystem, listed.namespace, _identify_uri(uri, opener))


def _identify_uri(uri: str, opener: Opener) -> DeviceContent:
    """Return the newest superblock of a device, or the reason why there is none."""
    try:
        with closing(opener(uri, writable=False)) as device:
            try:
                return DeviceContent(identify(device).newest)
            except FormatError as error:
                copies = read_copies(device)
                foreign = all(copy.foreign for copy in copies)
                unknown = tuple(copy for copy in copies if copy.unknown is not None)
                return DeviceContent(None, str(error), foreign, unknown)
    except Unusable as error:
        return DeviceContent(None, str(error))


def _problems(
    results: Iterable[Discovery | DlfsError], found: Iterable[FoundNamespace]
) -> list[str]:
    """Return a text for each controller, subsystem and namespace that was ignored."""
    problems = []
    for result in results:
        problems += [str(result)] if isinstance(result, DlfsError) else discovery_problems(result)
    return problems + [each.content.problem for each in found if each.content.problem is not None]


def discovery_problems(found: Discovery) -> list[str]:
    """Return a text for each referral and subsystem of a discovery that was ignored."""
    named = [
        *((f"referral to {referral.address}", referral.problem) for referral in found.referrals),
        *((f"subsystem {subsystem.nqn}", subsystem.problem) for subsystem in found.subsystems),
    ]
    return [f"{name}: {problem}" for name, problem in named if problem is not None]


# ---- choosing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _VolumeChoice:
    """The choice of one volume among those that were found."""

    given: Sequence[Superblock]
    """Superblocks of the devices that were given one by one."""
    found: Sequence[FoundNamespace]
    problems: list[str]

    def choose(self, wanted: set[UUID]) -> list[FoundNamespace]:
        """Return the discovered members of the chosen volume, by number."""
        volumes: dict[UUID, list[Superblock]] = {}
        for superblock in (*self.given, *(f.content.superblock for f in self.found)):
            if superblock is not None:
                volumes.setdefault(superblock.volume_uuid, []).append(superblock)
        meant = wanted or {superblock.volume_uuid for superblock in self.given} or set(volumes)
        if not meant & set(volumes):
            what = "a volume" if not wanted else f"volume {', '.join(map(str, wanted))}"
            raise NotFoundError(
                f"find {what} by discovery: there is none{self._describe_problems()}"
            )
        if len(meant) > 1:
            raise UsageError(
                "open a volume by discovery: expected one volume, or volume=UUID to choose one, "
                f"got {'; '.join(map(_describe, volumes.values()))}"
            )
        (uuid,) = meant
        newest = max(volumes[uuid], key=lambda superblock: superblock.generation)
        for namespace in self.found:
            check_known(namespace.content.unknown, newest)
        # A device that was given_uuids may be listed as well.
        given_uuids = {given.member_uuid for given in self.given}
        members = [
            namespace for namespace in self._members(newest) if _uuid(namespace) not in given_uuids
        ]
        self._check_complete(newest, given_uuids | {_uuid(namespace) for namespace in members})
        return sorted(members, key=lambda namespace: newest.member_uuids.index(_uuid(namespace)))

    def _members(self, newest: Superblock) -> Iterator[FoundNamespace]:
        """Yield the namespaces of the volume, without members that were replaced."""
        for namespace in self.found:
            own = namespace.content.superblock
            if own is None or own.volume_uuid != newest.volume_uuid:
                continue
            if own.member_uuid in newest.member_uuids:
                yield namespace
            else:
                self.problems.append(
                    f"{namespace.uri}: it was member {own.member_number} until generation "
                    f"{own.generation}, and was replaced"
                )

    def _check_complete(self, newest: Superblock, there: set[UUID]) -> None:
        missing = [n for n, uuid in enumerate(newest.member_uuids) if uuid not in there]
        if len(missing) >= newest.geometry.replicas:
            names = ", ".join(f"{number} ({newest.member_uuids[number]})" for number in missing)
            count = newest.geometry.member_count
            raise NotFoundError(
                f"open volume {newest.volume_uuid} by discovery: expected {count} members, "
                f"got {count - len(missing)}; missing: {names}{self._describe_problems()}"
            )

    def _describe_problems(self) -> str:
        if not self.problems:
            return ""
        reasons = "; ".join(self.problems[:REASONS_MAX])
        more = len(self.problems) - REASONS_MAX
        return f"; passed over: {reasons}" + (f"; and {more} more" if more > 0 else "")


def _uuid(namespace: FoundNamespace) -> UUID:
    assert namespace.content.superblock is not None
    return namespace.content.superblock.member_uuid


def _describe(superblocks: Sequence[Superblock]) -> str:
    first = superblocks[0]
    label = f" {first.label!r}" if first.label else ""
    count = len({superblock.member_number for superblock in superblocks})
    return f"{first.volume_uuid}{label}, {count} of {first.geometry.member_count} members"
