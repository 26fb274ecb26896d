"""The controller service: makes, expands and deletes volumes on the storage nodes of pools.

It has no state of its own: what exists is what the storage nodes have. Every call may be made again
after it was interrupted at any point, by this process or another one. A volume is formatted as
DLFS when it is made; an import writes to it by its devices, outside of any mount.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import dlfs
from dlfs.base.units import KIB, MIB, parse_bytes
from dlfs.errors import DlfsError, FormatError, UsageError
from dlfs.fabric.composing import ComposedNamespace, ComposingTarget
from dlfs_csi.context import KEYS as ATTRIBUTES
from dlfs_csi.context import check_capability, check_id, invalid, own_attributes, parse_attributes
from dlfs_csi.failures import CallError, Code, code_of
from dlfs_csi.pools import GENERATIONS_MAX, Place, Pool, open_targets, volume_name, volumes_of

NAME_BYTES_MAX = 1024
LABEL_BYTES_MAX = 64

_OWN = ("pool", "replicas", "label", "chunkSize")
_PASSED_ON = tuple(key for key in ATTRIBUTES if key not in ("volumes", "dataset"))
"""Parameters of a StorageClass that become attributes of its volumes."""


@dataclass(frozen=True)
class _Layout:
    """Options of a new volume, from the parameters of its StorageClass."""

    replicas: int
    label: str
    chunk_bytes: int


@dataclass(frozen=True)
class Found:
    """A volume that exists.

    Attributes:
        volume_id: its identifier.
        capacity_bytes: its size, in bytes.
        attributes: attributes for NodePublishVolume.
    """

    volume_id: str
    capacity_bytes: int
    attributes: dict[str, str]


@contextlib.contextmanager
def _calling() -> Iterator[None]:
    """Fail a call with the code of the error that a storage node or device has raised."""
    try:
        yield
    except DlfsError as error:
        raise CallError(code_of(error), str(error)) from error


class Controller:
    """The controller service.

    Args:
        pools: the pools, by their names.

    Threads: any; one call at a time for a volume.
    """

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._pools = pools
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    def check_ready(self) -> None:
        """Nothing is needed: a call connects to its storage nodes."""

    @contextlib.contextmanager
    def _at(self, place: Place) -> Iterator[list[ComposingTarget]]:
        """Have a volume for one call, and connections to its storage nodes."""
        with self._lock:
            if place.volume_id in self._busy:
                raise CallError(Code.ABORTED, f"{place.volume_id}: another call is under way")
            self._busy.add(place.volume_id)
        try:
            with _calling(), ExitStack() as stack:
                yield open_targets(place.pool, stack)
        finally:
            with self._lock:
                self._busy.discard(place.volume_id)

    def _pool(self, name: str) -> Pool:
        if name not in self._pools:
            known = ", ".join(sorted(self._pools)) or "none"
            raise invalid(f"parameter 'pool': expected one of {known}, got {name!r}")
        return self._pools[name]

    def _place(self, volume_id: str) -> Place | None:
        """Return where a volume is; None if no volume has such an identifier."""
        check_id(volume_id)
        pool_name, _, name = volume_id.partition("/")
        if pool_name not in self._pools or volume_name(name) != name:
            return None
        return Place(pool_name, self._pools[pool_name], name)

    # ---- CreateVolume ----------------------------------------------------------------------------

    def create(self, request: Any) -> Found:
        """Make a volume, or find that it exists as asked.

        Args:
            request: a CreateVolumeRequest.

        Raises:
            CallError: ALREADY_EXISTS: it exists with another size; OUT_OF_RANGE;
                RESOURCE_EXHAUSTED: a storage node has no room; ...
        """
        if not request.name or len(request.name.encode()) > NAME_BYTES_MAX:
            raise invalid(f"name: expected 1 to {NAME_BYTES_MAX} bytes")
        parameters = dict(request.parameters)
        self._check_capabilities(request.volume_capabilities, parameters)
        if request.HasField("volume_content_source"):
            raise invalid("volume_content_source: expected none; import into the new volume")
        if request.mutable_parameters:
            raise invalid("mutable_parameters: expected none")
        layout, attributes = self._parameters(parameters)
        pool_name = parameters.get("pool", "")
        place = Place(pool_name, self._pool(pool_name), volume_name(request.name))
        member_bytes, capacity_bytes = _sizes(place.pool, layout.replicas, request.capacity_range)
        with self._at(place) as targets:
            made = place.compose(targets, 1, member_bytes)
            uris = [place.uri(each) for each in made]
            self._format(uris, layout)
        attributes |= {"volumes": ",".join(uris)}
        return Found(place.volume_id, capacity_bytes, attributes)

    def _check_capabilities(self, capabilities: Any, context: Mapping[str, str]) -> None:
        if not capabilities:
            raise invalid("volume_capabilities: expected at least one, got none")
        for each in capabilities:
            check_capability(each, context)

    def _parameters(self, given: Mapping[str, str]) -> tuple[_Layout, dict[str, str]]:
        """Return how a volume is formatted, and the attributes that its mounts have."""
        own = own_attributes(given)
        unknown = sorted(set(own) - {*_OWN, *_PASSED_ON})
        if unknown:
            expected = ", ".join((*_OWN, *_PASSED_ON))
            raise invalid(f"parameter {unknown[0]!r}: expected one of {expected}")
        replicas = own.get("replicas", "1")
        if replicas not in ("1", "2", "3", "4"):
            raise invalid(f"parameter 'replicas': expected 1..4, got {replicas!r}")
        label = own.get("label", "")
        if len(label.encode()) > LABEL_BYTES_MAX:
            raise invalid(f"parameter 'label': expected at most {LABEL_BYTES_MAX} bytes")
        try:
            chunk_bytes = parse_bytes(own.get("chunkSize", "256KiB"))
        except UsageError as error:
            raise invalid(f"parameter 'chunkSize': {error}") from error
        if chunk_bytes < 4 * KIB or chunk_bytes > 64 * MIB or chunk_bytes & (chunk_bytes - 1):
            raise invalid(
                "parameter 'chunkSize': expected a power of two, 4KiB to 64MiB, got "
                f"{own['chunkSize']!r}"
            )
        attributes = {key: text for key, text in own.items() if key in _PASSED_ON}
        parse_attributes({**attributes, "volumes": "nvme-tcp://h/nqn.2024-01.a:b?nsid=1"})
        return _Layout(int(replicas), label, chunk_bytes), attributes

    def _format(self, uris: list[str], layout: _Layout) -> None:
        """Format the volume on new namespaces, unless an earlier call has."""
        try:
            with dlfs.open(uris):
                return
        except FormatError:
            dlfs.format_volume(
                uris, chunk_bytes=layout.chunk_bytes, label=layout.label, replicas=layout.replicas
            )

    # ---- the other calls -------------------------------------------------------------------------

    def delete(self, volume_id: str) -> None:
        """Delete a volume and its bytes, if it exists."""
        place = self._place(volume_id)
        if place is not None:
            with self._at(place) as targets:
                place.withdraw(targets)

    def validate(self, request: Any) -> str:
        """Check whether a volume can be used as asked. Returns why it can not; empty if it can.

        Raises:
            CallError: NOT_FOUND: there is no such volume.
        """
        place = self._place(request.volume_id)
        if not request.volume_capabilities:
            raise invalid("volume_capabilities: expected at least one, got none")
        if place is None:
            raise _no_volume(request.volume_id)
        with self._at(place) as targets:
            if not place.generations(targets):
                raise _no_volume(request.volume_id)
        try:
            context = {**request.parameters, **request.volume_context}
            self._check_capabilities(request.volume_capabilities, context)
        except CallError as error:
            return str(error)
        return ""

    def expand(self, request: Any) -> int:
        """Give a volume at least the size that is asked for. Returns its size, in bytes.

        The volume gets another member on each storage node, while readers go on.

        Raises:
            CallError: NOT_FOUND: there is no such volume; OUT_OF_RANGE.
        """
        place = self._place(request.volume_id)
        if not request.HasField("capacity_range") or request.capacity_range.required_bytes <= 0:
            raise invalid("capacity_range: expected required_bytes, got none")
        if place is None:
            raise _no_volume(request.volume_id)
        wanted, limit = request.capacity_range.required_bytes, request.capacity_range.limit_bytes
        with self._at(place) as targets:
            generations = place.generations(targets)
            if not generations:
                raise _no_volume(request.volume_id)
            first = [place.uri(each) for each in generations[0] if each is not None]
            with dlfs.open(first) as volume:
                return self._grow(place, targets, volume, wanted, limit)

    def _grow(
        self,
        place: Place,
        targets: list[ComposingTarget],
        volume: dlfs.Volume,
        wanted: int,
        limit: int,
    ) -> int:
        info = volume.info()
        members, replicas = len(place.pool.nodes), info.replicas
        count = len(info.members) // members
        generations = place.generations(targets)
        size = sum(
            each.size_bytes for row in generations[:count] for each in row if each is not None
        )
        if size // replicas >= wanted:
            return size // replicas
        if count >= GENERATIONS_MAX:
            raise CallError(
                Code.OUT_OF_RANGE, f"{place.volume_id}: expected at most {GENERATIONS_MAX} sizes"
            )
        begun = [each for row in generations[count:] for each in row if each is not None]
        member_bytes = _round_up(-(-(wanted * replicas - size) // members))
        if begun:  # by a call that was interrupted
            member_bytes = begun[0].size_bytes
        capacity = (size + members * member_bytes) // replicas
        if limit and capacity > limit:
            raise CallError(
                Code.OUT_OF_RANGE, f"expected a limit of at least {capacity} bytes, got {limit}"
            )
        made = place.compose(targets, count + 1, member_bytes)
        volume.grow([place.uri(each) for each in made], force=bool(begun))
        return capacity if capacity >= wanted else self._grow(place, targets, volume, wanted, limit)

    def list(self, most: int, token: str) -> tuple[list[Found], str]:
        """Return volumes by their identifiers, and the token of the next page.

        Args:
            most: most volumes; 0: all.
            token: the token of the page before; empty: from the first.

        Raises:
            CallError: ABORTED: the token is of no page.
        """
        if most < 0:
            raise invalid(f"max_entries: expected at least 0, got {most}")
        if token and self._place(token) is None:
            raise CallError(Code.ABORTED, "starting_token: expected that of a page, got another")
        after = (*token.split("/", 1), "")[:2]
        found: list[Found] = []
        for name in sorted(self._pools):
            pool = self._pools[name]
            with _calling(), ExitStack() as stack:
                for place, row in volumes_of(name, pool, open_targets(pool, stack)):
                    if (name, place.name) > after:
                        found.append(_describe(place, row))
                    if most and len(found) > most:
                        return found[:most], found[most - 1].volume_id
        return found, ""


def _describe(place: Place, row: list[ComposedNamespace]) -> Found:
    uris = ",".join(map(place.uri, row))
    return Found(place.volume_id, 0, {"volumes": uris})


def _no_volume(volume_id: str) -> CallError:
    return CallError(Code.NOT_FOUND, f"there is no volume {volume_id[:200]!r}")


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // MIB) * MIB


def _sizes(pool: Pool, replicas: int, wanted: Any) -> tuple[int, int]:
    """Return the size of each member and of the volume, in bytes.

    The size of a volume is that of its namespaces by its replicas. Its datasets have 1 % less.

    Raises:
        CallError: OUT_OF_RANGE, INVALID_ARGUMENT: there is no such size.
    """
    required, limit = wanted.required_bytes, wanted.limit_bytes
    if required < 0 or limit < 0 or (limit and limit < required):
        raise invalid(f"capacity_range: expected a range, got {required} to {limit} bytes")
    if replicas > len(pool.nodes):
        raise invalid(
            f"parameter 'replicas': expected at most {len(pool.nodes)}, the storage nodes of the "
            f"pool, got {replicas}"
        )
    asked = required or min(pool.default_bytes, limit or pool.default_bytes)
    member_bytes = _round_up(-(-asked * replicas // len(pool.nodes)))
    capacity_bytes = member_bytes * len(pool.nodes) // replicas
    if limit and capacity_bytes > limit:
        raise CallError(
            Code.OUT_OF_RANGE,
            f"capacity_range: expected a limit of at least {capacity_bytes} bytes, for members of "
            f"whole MiB, got {limit}",
        )
    return member_bytes, capacity_bytes
