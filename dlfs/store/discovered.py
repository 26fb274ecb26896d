"""Volumes by discovery: which namespaces that storage nodes list are members of which volume.

A ``nvme-tcp+discover:`` URI stands for every namespace that a discovery controller lists. Several
of them, one for each storage node, and URIs of single devices may stand together; members are told
by the UUIDs in their superblocks, whatever order and address they are at. What cannot be opened, or
is no member of the volume, is passed over; where too many members are missing, the error says what
was passed over and why.

A namespace that several controllers list is one namespace with several paths, if it has the same
subsystem, number and identity.

Threads: controllers are asked, and devices opened, up to 16 at a time, so that what is down costs
its time once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

from dlfs.arguments import Engine
from dlfs.block import NvmeTcpDiscoverUri, open_device, parse_uri
from dlfs.errors import FormatError, NotFoundError, UsageError
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
from dlfs.store.members import Opener, identify, read_copies

TOLD_MAX = 16
"""Reasons in one error message."""


@dataclass(frozen=True, slots=True)
class FoundNamespace:
    """A namespace that a discovery controller lists, and what is on it.

    Attributes:
        uri: of the device.
        subsystem: that it belongs to.
        namespace: its number, size and identity.
        superblock: the newest one on it; None where it is no member of a volume.
        problem: why it is none, or cannot be told; None where it is one.
        foreign: nothing on it claims to be a member's.
    """

    uri: str
    subsystem: SubsystemInfo
    namespace: NamespaceInfo
    superblock: Superblock | None
    problem: str | None
    foreign: bool


def find_namespaces(
    discoveries: Iterable[tuple[NvmeTcpDiscoverUri, Discovery]],
    *,
    engine: Engine = "auto",
    opener: Opener = open_device,
) -> list[FoundNamespace]:
    """Tell what is on every namespace of some discoveries, by opening it for reading.

    Args:
        discoveries: with the URIs that they came from, whose options hold for the namespaces too.
        engine: for the opener.
        opener: of devices.
    """
    return all_at_once(lambda listed: _look_at(listed, engine, opener), _listed(discoveries))


def resolve_uris(
    uris: Sequence[str], *, engine: Engine = "auto", opener: Opener = open_device
) -> tuple[str, ...]:
    """Put the URIs of a volume's members in the place of those that stand for a discovery.

    Args:
        uris: of devices and of discovery controllers; without any of the latter, they are the
            result.
        engine: for the opener.
        opener: of devices.

    Returns:
        The URIs of single devices as they were given, then the members that were discovered, by
        number.

    Raises:
        NotFoundError: no volume is there, or too many of its members are missing.
        UsageError: several volumes are there, and nothing says which one is meant.
    """
    parsed = [parse_uri(uri) for uri in uris]
    asked = [uri for uri in parsed if isinstance(uri, NvmeTcpDiscoverUri)]
    if not asked:
        return tuple(uris)
    single = [u for u, p in zip(uris, parsed, strict=True) if not isinstance(p, NvmeTcpDiscoverUri)]
    given = [_identify_uri(uri, engine, opener) for uri in single]
    answers = list(zip(asked, all_at_once(_ask, asked), strict=True))
    listed = [(uri, answer) for uri, answer in answers if isinstance(answer, Discovery)]
    found = find_namespaces(listed, engine=engine, opener=opener)
    choice = _Choice(
        given=[content.superblock for content in given if content.superblock is not None],
        found=found,
        problems=[
            *(content.problem for content in given if content.problem is not None),
            *_problems((answer for _, answer in answers), found),
        ],
    )
    members = choice.choose({uri.volume for uri in asked if uri.volume is not None})
    return (*single, *(member.uri for member in members))


def _ask(uri: NvmeTcpDiscoverUri) -> Discovery | str:
    """What a controller lists, or why that is not known."""
    try:
        return discover(uri)
    except Unusable as error:
        return str(error)


# ---- namespaces ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Listed:
    asked: NvmeTcpDiscoverUri
    subsystem: SubsystemInfo
    namespace: NamespaceInfo
    paths: tuple[Address, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """The same for one namespace, whoever lists it."""
        name = self.namespace.identity or self.paths
        return (self.subsystem.nqn, self.namespace.nsid, name)


def _listed(discoveries: Iterable[tuple[NvmeTcpDiscoverUri, Discovery]]) -> list[_Listed]:
    """Every namespace once, with the paths that all controllers know."""
    by_key: dict[tuple[object, ...], _Listed] = {}
    for asked, discovery in discoveries:
        for subsystem in discovery.subsystems:
            for namespace in subsystem.namespaces:
                found = _Listed(asked, subsystem, namespace, subsystem.paths)
                first = by_key.setdefault(found.key, found)
                paths = tuple(dict.fromkeys((*first.paths, *found.paths)))
                by_key[found.key] = _Listed(first.asked, first.subsystem, namespace, paths)
    return list(by_key.values())


def _look_at(listed: _Listed, engine: Engine, opener: Opener) -> FoundNamespace:
    uri = str(
        namespace_uri(listed.asked, listed.subsystem.nqn, listed.paths, nsid=listed.namespace.nsid)
    )
    found = _identify_uri(uri, engine, opener)
    return FoundNamespace(
        uri, listed.subsystem, listed.namespace, found.superblock, found.problem, found.foreign
    )


@dataclass(frozen=True, slots=True)
class _Content:
    superblock: Superblock | None
    problem: str | None = None
    foreign: bool = False


def _identify_uri(uri: str, engine: Engine, opener: Opener) -> _Content:
    """What is on a device: the newest superblock, or why there is none."""
    try:
        device = opener(uri, writable=False, engine=engine)
    except Unusable as error:
        return _Content(None, str(error))
    try:
        return _Content(identify(device).newest)
    except FormatError as error:
        foreign = all(copy.foreign for copy in read_copies(device))
        return _Content(None, str(error), foreign)
    except Unusable as error:
        return _Content(None, str(error))
    finally:
        device.close()


def _problems(answers: Iterable[Discovery | str], found: Iterable[FoundNamespace]) -> list[str]:
    """What was passed over, and why."""
    problems = []
    for answer in answers:
        if isinstance(answer, str):
            problems.append(answer)
            continue
        problems += [
            f"referral to {referral.address}: {referral.problem}"
            for referral in answer.referrals
            if referral.problem is not None
        ]
        problems += [
            f"subsystem {subsystem.nqn}: {subsystem.problem}"
            for subsystem in answer.subsystems
            if subsystem.problem is not None
        ]
    problems += [namespace.problem for namespace in found if namespace.problem is not None]
    return problems


# ---- choosing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which volume is meant, of those that were found."""

    given: Sequence[Superblock]
    """Of the devices that were named one by one."""
    found: Sequence[FoundNamespace]
    problems: list[str]

    def choose(self, wanted: set[UUID]) -> list[FoundNamespace]:
        """The members that were discovered, by number."""
        volumes: dict[UUID, list[Superblock]] = {}
        for superblock in (*self.given, *(f.superblock for f in self.found)):
            if superblock is not None:
                volumes.setdefault(superblock.volume_uuid, []).append(superblock)
        meant = wanted or {superblock.volume_uuid for superblock in self.given} or set(volumes)
        if not meant & set(volumes):
            what = "a volume" if not wanted else f"volume {', '.join(map(str, wanted))}"
            raise NotFoundError(f"find {what} by discovery: there is none{self._passed_over()}")
        if len(meant) > 1:
            raise UsageError(
                "open a volume by discovery: expected one volume, or volume=UUID to choose one, "
                f"got {'; '.join(map(_describe, volumes.values()))}"
            )
        (uuid,) = meant
        newest = max(volumes[uuid], key=lambda superblock: superblock.generation)
        # What was named itself may be listed as well.
        named = {given.member_uuid for given in self.given}
        members = [
            namespace for namespace in self._members(newest) if _uuid(namespace) not in named
        ]
        self._check_complete(newest, named | {_uuid(namespace) for namespace in members})
        return sorted(members, key=lambda namespace: newest.member_uuids.index(_uuid(namespace)))

    def _members(self, newest: Superblock) -> Iterator[FoundNamespace]:
        """The namespaces of the volume, without those that are its members no more."""
        for namespace in self.found:
            own = namespace.superblock
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
                f"got {count - len(missing)}; missing: {names}{self._passed_over()}"
            )

    def _passed_over(self) -> str:
        if not self.problems:
            return ""
        told = "; ".join(self.problems[:TOLD_MAX])
        more = len(self.problems) - TOLD_MAX
        return f"; passed over: {told}" + (f"; and {more} more" if more > 0 else "")


def _uuid(namespace: FoundNamespace) -> UUID:
    assert namespace.superblock is not None
    return namespace.superblock.member_uuid


def _describe(superblocks: Sequence[Superblock]) -> str:
    first = superblocks[0]
    label = f" {first.label!r}" if first.label else ""
    count = len({superblock.member_number for superblock in superblocks})
    return f"{first.volume_uuid}{label}, {count} of {first.geometry.member_count} members"
