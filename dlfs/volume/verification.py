"""Verifies a whole volume: every superblock copy, the catalog, every directory block, every sample.

Samples are read as whole chunks in storage order, at the sequential speed of the devices. Native
code computes their checksums. Chunks that several versions share are read once. All bytes are read
from media; caches are not used. Padding and free chunks are not checked, because nothing depends on
them. A dataset that is removed during the verification is left out from then on. Of an unfinished
import, the journal and the samples of its steps are checked.

With replicas, every copy is checked separately, and a finding names the member. A member that is
missing, degraded or lost during the verification is one finding; its copies add none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlfs._native.packing import sum_ranges
from dlfs.attributes import AttributeTable, read_attributes
from dlfs.connection.previous_version import SharedChunks
from dlfs.connection.segment_loading import load_segment
from dlfs.connection.unfinished import load_step
from dlfs.directory import CheckedRanges, FrozenDirectory, checked_ranges
from dlfs.errors import DeviceError, DlfsError, FormatError, StaleError
from dlfs.format.attributes import AttributeHead
from dlfs.format.catalog import DatasetRecord
from dlfs.format.digests import make_digests
from dlfs.format.geometry import DataSpace
from dlfs.format.paths import display
from dlfs.store.chunk_reader import CopyOrder, FailedRead, Window, scan_space
from dlfs.store.info import describe_member
from dlfs.store.journal import read_steps
from dlfs.store.segments import read_segment
from dlfs.store.space import TakenRuns
from dlfs.store.transaction import Generation, load_generation, read_catalog

Progress = Callable[[int, int], None]
Int64Array = NDArray[np.int64]
Lost = dict[int, DlfsError]
"""Errors of the members that cannot be read, by member number."""
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One defect.

    Attributes:
        kind: ``member``, ``superblock``, ``catalog``, ``directory``, ``attributes``, ``journal`` or
            ``sample``.
        message: complete description of the defect.
        dataset: name of the dataset, if the defect is in one.
        version: version of that dataset.
        path: path of the sample, if the defect is in one.
        index: index of that sample.
        sample_offset_bytes: first damaged byte of that sample: not 0 in a part of one larger than a
            chunk, whose parts have checksums of their own.
        length_bytes: length of what one checksum covers there: the sample, or the part of it.
        member: URI of the member where the defect lies or begins.
        offset_bytes: offset on that member, in bytes.
    """

    kind: str
    message: str
    dataset: str | None = None
    version: int | None = None
    path: bytes | None = None
    index: int | None = None
    sample_offset_bytes: int | None = None
    length_bytes: int | None = None
    member: str | None = None
    offset_bytes: int | None = None

    def __str__(self) -> str:
        return self.message


def verify_volume(
    generation: Generation, records: Sequence[DatasetRecord], progress: Progress
) -> Iterator[Finding]:
    """Verify the superblocks of a volume, and some of its datasets.

    Args:
        generation: generation with open devices; its catalog has just been read and checked.
        records: records of the datasets and of the unfinished imports to verify.
        progress: called with the bytes done and the total bytes.

    Yields:
        One finding for each defect.
    """
    yield from _verify_members(generation)
    yield from _verify_superblocks(generation)
    lost: Lost = {}
    yield from _verify_catalog(generation, lost)
    sealed = [record for record in records if record.state == "sealed"]
    shared = SharedChunks(generation.geometry, sealed)
    total = sum(_size_of(generation, record, shared) for record in records)
    done = 0
    progress(done, total)
    for record in records:
        kind = _DatasetCheck if record.state == "sealed" else _UnfinishedCheck
        check = kind(generation, record, lost, shared)
        found = check.run(
            lambda part, base=done: progress(min(base + part, total), total)  # type: ignore[misc]
        )
        try:
            for finding in found:
                if _is_removed(generation, record):
                    break
                yield finding
        except StaleError:
            if not _is_removed(generation, record):
                raise
        done += _size_of(generation, record, shared)
        progress(done, total)
    yield from _report_lost(generation, lost)


def _report_lost(generation: Generation, lost: Lost) -> Iterator[Finding]:
    """Yield the members that were readable at first and were lost during the verification."""
    for number, error in sorted(lost.items()):
        member = generation.members[number]
        if member.reason is None:
            message = f"{member}: was lost while it was verified: {error}"
            yield Finding(kind="member", message=message, member=member.device.uri)


def _size_of(generation: Generation, record: DatasetRecord, shared: SharedChunks) -> int:
    """Return the bytes to read for a dataset: all copies of its data, and its directory."""
    data_bytes = record.data_bytes - shared.size_bytes(record)
    data_bytes *= generation.geometry.replicas
    return data_bytes + record.entries_bytes + record.names_bytes + record.journal_bytes


def _verify_members(generation: Generation) -> Iterator[Finding]:
    generation_note = "" if generation.unproven is None else f"; {generation.unproven}"
    for member in generation.absent:
        yield Finding(kind="member", message=f"{member}{generation_note}", member=member.device.uri)


def _verify_catalog(generation: Generation, lost: Lost) -> Iterator[Finding]:
    """Verify the copies of the catalog other than the one that was read at opening."""
    superblock, geometry = generation.superblock, generation.geometry
    if geometry.replicas == 1:
        return
    space = DataSpace(geometry, superblock.catalog_runs)
    raw = read_catalog(generation.members, superblock)[1]
    yield from _compare_copies(generation, space, raw, lost, "the catalog", kind="catalog")


def _compare_copies(
    generation: Generation, space: DataSpace, correct: Bytes, lost: Lost, what: str, **fields: Any
) -> Iterator[Finding]:
    """Compare each copy with the correct bytes; yield one finding for each bad chunk."""
    for copy in range(space.geometry.replicas):
        for window in scan_space(generation.sources, space, CopyOrder(copy=copy, only=True)):
            lost |= _absent(window.failures)
            yield from _compare_window(generation, space, correct, copy, window, what, fields)


def _compare_window(
    generation: Generation,
    space: DataSpace,
    correct: Bytes,
    copy: int,
    window: Window,
    what: str,
    fields: dict[str, Any],
) -> Iterator[Finding]:
    chunk_bytes = space.geometry.chunk_bytes
    end = min(window.address + window.memory.nbytes, correct.nbytes)
    for address in range(window.address, end, chunk_bytes):
        expected = correct[address : min(address + chunk_bytes, end)]
        got = window.memory[address - window.address :][: expected.nbytes]
        failure = window.failure_at(address, chunk_bytes)
        if failure is not None and failure.absent:
            continue
        if failure is None and np.array_equal(got, expected):
            continue
        at = 0 if failure is not None else int(np.argmax(got != expected))
        member, offset_bytes = space.resolve(address + at, copy)
        uri = generation.devices[member].uri
        reason = "expected what other copies have, got other bytes" if failure is None else None
        yield Finding(
            message=f"{what}, copy {copy}: {uri} at byte {offset_bytes}: "
            f"{reason or (failure and failure.error)}",
            member=uri,
            offset_bytes=offset_bytes,
            **fields,
        )


def _absent(failures: Sequence[FailedRead]) -> Lost:
    return {failure.member: failure.error for failure in failures if failure.absent}


def _verify_superblocks(generation: Generation) -> Iterator[Finding]:
    for member in generation.members:
        for copy in describe_member(member, generation.superblock).superblocks:
            if copy.state not in ("damaged", "stale"):
                continue
            problem = copy.problem or (
                f"{member.device.uri} at byte {copy.offset_bytes}: expected generation "
                f"{generation.superblock.generation}, got {copy.generation}"
            )
            yield Finding(
                kind="superblock",
                message=f"superblock {copy.name}: {problem}",
                member=member.device.uri,
                offset_bytes=copy.offset_bytes,
            )


def _is_removed(generation: Generation, record: DatasetRecord) -> bool:
    try:
        catalog = load_generation(generation.devices).catalog
        if record.state == "sealed":
            return catalog.find_uuid(record.uuid) is None
        found = catalog.find_unfinished(record.name)
        return found is None or found.uuid != record.uuid
    except (DlfsError, OSError):
        return False


class _DatasetCheck:
    """The verification of one dataset."""

    def __init__(
        self, generation: Generation, record: DatasetRecord, lost: Lost, shared: SharedChunks
    ) -> None:
        self._generation = generation
        self._shared = shared
        self._lost = lost
        self._record = record
        samples_runs, attributes_runs = record.split_data_runs(generation.geometry.chunk_bytes)
        self._space = DataSpace(generation.geometry, samples_runs)
        self._attributes_space = DataSpace(generation.geometry, attributes_runs)
        self._name = f"dataset {display(record.name)!r} version {record.version}"
        self._head: AttributeHead | None = None
        self._copy = 0  # number of the copy that is being checked
        self._start = 0  # address of the first chunk to read

    def run(self, progress: Callable[[int], None]) -> Iterator[Finding]:
        damaged = [*self._check_attributes()]
        yield from damaged
        try:
            directory = load_segment(self._generation, self._record, shared=False)
        except (FormatError, DeviceError) as error:
            yield self._directory_finding(error)
            return
        try:
            found = [*self._check_directory(directory)]
            yield from found
            if not damaged and not found:
                yield from self._check_digests(directory)
            done = self._record.entries_bytes + self._record.names_bytes
            done += self._attributes_space.size_bytes * self._space.geometry.replicas
            progress(done)
            yield from self._check_copies(directory, lambda part: progress(done + part))
        finally:
            directory.close()

    def _check_copies(
        self, directory: FrozenDirectory, progress: Callable[[int], None]
    ) -> Iterator[Finding]:
        """Check each copy of the samples, except in chunks that were checked with another version.

        If a shared chunk has a damaged sample, it is read again: each version gets a finding.
        """
        self._start = self._shared.start(self._record, directory)
        ranges = checked_ranges(directory, start=self._start, end=self._space.size_bytes)
        intact, done = True, -self._start
        for finding in self._find_outside(directory):
            intact = False
            yield finding
        for copy in range(self._space.geometry.replicas):
            self._copy = copy
            for finding in self._scan(
                directory,
                ranges,
                lambda address, done=done: progress(done + address),  # type: ignore[misc]
            ):
                intact = False
                yield finding
            done += self._space.size_bytes - self._start
        if intact:
            self._shared.add_intact(self._record, directory)

    def _directory_finding(self, problem: object) -> Finding:
        space = DataSpace(self._generation.geometry, self._record.directory_runs)
        return self._segment_finding("directory", space, problem)

    def _segment_finding(self, kind: str, space: DataSpace, problem: object) -> Finding:
        member, offset_bytes = space.resolve(0)
        return Finding(
            kind=kind,
            message=f"{self._name}: {problem}",
            dataset=display(self._record.name),
            version=self._record.version,
            member=self._generation.devices[member].uri,
            offset_bytes=offset_bytes,
        )

    def _check_directory(self, directory: FrozenDirectory) -> Iterator[Finding]:
        try:
            directory.verify()
        except (FormatError, DeviceError) as error:
            yield self._directory_finding(error)
        yield from self._check_directory_copies()
        total = int(directory.lengths().sum())
        if total != self._record.sample_bytes:
            yield self._directory_finding(
                f"expected {self._record.sample_bytes} bytes in all samples, got {total}"
            )

    def _check_digests(self, directory: FrozenDirectory) -> Iterator[Finding]:
        """Compare the digests with those of the segments, which are intact."""
        got = make_digests(*directory.memory(), self._head)
        recorded = self._record.digests
        for what, expected, found in (
            ("content", recorded.content, got.content),
            ("packing", recorded.packing, got.packing),
        ):
            if expected != found:
                yield self._directory_finding(f"expected the {what} digest {expected}, got {found}")

    def _check_directory_copies(self) -> Iterator[Finding]:
        geometry = self._space.geometry
        if geometry.replicas == 1:
            return
        try:
            correct = read_segment(self._generation.sources, geometry, self._record)
        except (FormatError, DeviceError):
            return  # reported already
        correct = correct[: self._record.entries_bytes + self._record.names_bytes]
        space = DataSpace(geometry, self._record.directory_runs)
        yield from self._compare_segments("directory", space, correct)

    def _compare_segments(self, kind: str, space: DataSpace, correct: Bytes) -> Iterator[Finding]:
        yield from _compare_copies(
            self._generation,
            space,
            correct,
            self._lost,
            f"{self._name}: the {kind}",
            kind=kind,
            dataset=display(self._record.name),
            version=self._record.version,
        )

    def _check_attributes(self) -> Iterator[Finding]:
        """Verify every block of the attributes in all copies, and the columns."""
        extent, generation = self._record.attribute_extent, self._generation
        if extent is None:
            return
        geometry, space = self._space.geometry, self._attributes_space
        try:
            correct = read_attributes(generation.sources, geometry, self._record)
            assert correct is not None
            table = AttributeTable.over(correct, extent.head_bytes, where=self._name, verify=False)
            table.verify()
            self._head = table.head
        except (FormatError, DeviceError) as error:
            yield self._segment_finding("attributes", space, error)
            return
        if geometry.replicas > 1:
            yield from self._compare_segments("attributes", space, correct[: extent.segment_bytes])

    def _find_outside(self, directory: FrozenDirectory) -> Iterator[Finding]:
        """Yield the samples that reach beyond the dataset's data."""
        ends = directory.addresses().astype(np.int64) + directory.lengths()
        for index in np.flatnonzero(ends > self._space.size_bytes).tolist():
            address, length = (
                int(directory.addresses([index])[0]),
                int(directory.lengths([index])[0]),
            )
            damage = _Damage(index, 0, length, address, "lies outside the dataset's data")
            yield self._sample_finding(directory, damage)

    def _scan(
        self, directory: FrozenDirectory, ranges: CheckedRanges, progress: Callable[[int], None]
    ) -> Iterator[Finding]:
        """Compute and compare the checksums of samples, or parts of them, window by window."""
        first = 0
        choice = CopyOrder(copy=self._copy, only=True)
        for window in scan_space(self._generation.sources, self._space, choice, start=self._start):
            self._lost |= _absent(window.failures) if self._space.geometry.replicas > 1 else {}
            crcs = sum_ranges(
                ranges.locations[first:], window=window.memory, window_address=window.address
            )
            passed = slice(first, first + len(crcs))
            first = passed.stop
            for position in self._find_bad(window, ranges, passed, crcs).tolist():
                number = passed.start + position
                reason = _failed_read(window, ranges, number)
                expected, got = int(ranges.crcs[number]), int(crcs[position])
                reason = reason or f"expected CRC32C {expected:#010x}, got {got:#010x}"
                index, address = int(ranges.samples[number]), int(ranges.addresses[number])
                offset = address - int(directory.addresses([index])[0])
                damage = _Damage(index, offset, int(ranges.lengths[number]), address, reason)
                yield self._sample_finding(directory, damage)
            progress(window.address + window.memory.nbytes)

    def _find_bad(
        self, window: Window, ranges: CheckedRanges, passed: slice, crcs: NDArray[np.uint32]
    ) -> NDArray[np.int64]:
        """Return the positions, of the ranges of a window, of those that are wrong or unreadable.

        With replicas, those on a lost member are none.
        """
        bad = crcs != ranges.crcs[passed]
        addresses, lengths = ranges.addresses[passed], ranges.lengths[passed]
        for failure in window.failures:
            bad |= _touches(failure, addresses, lengths)
        for failure in window.failures:
            if failure.absent and self._space.geometry.replicas > 1:
                bad &= ~_touches(failure, addresses, lengths)
        return np.flatnonzero(bad)

    def _sample_finding(self, directory: FrozenDirectory, damage: _Damage) -> Finding:
        path = directory.name(damage.index)
        member, offset_bytes = None, None
        if damage.address < self._space.size_bytes:
            number, offset_bytes = self._space.resolve(damage.address, self._copy)
            member = self._generation.devices[number].uri
        length = int(directory.lengths([damage.index])[0])
        part = ""
        if damage.length_bytes < length:
            last = damage.offset_bytes + damage.length_bytes - 1
            part = f", bytes {damage.offset_bytes} to {last} of {length}"
        return Finding(
            kind="sample",
            message=(
                f"sample {damage.index} {display(path)!r} of {self._name}{part}: {member} at byte "
                f"{offset_bytes}, {damage.length_bytes} bytes: {damage.reason}"
            ),
            dataset=display(self._record.name),
            version=self._record.version,
            path=path,
            index=damage.index,
            sample_offset_bytes=damage.offset_bytes,
            length_bytes=damage.length_bytes,
            member=member,
            offset_bytes=offset_bytes,
        )


class _UnfinishedCheck(_DatasetCheck):
    """The verification of an unfinished import."""

    def run(self, progress: Callable[[int], None]) -> Iterator[Finding]:
        generation, whole = self._generation, self._record
        geometry, data = generation.geometry, TakenRuns(whole.data_runs)
        self._name = f"the unfinished import of {display(whole.name)!r}"
        journal = DataSpace(geometry, whole.journal_runs)
        done = whole.journal_bytes
        try:
            steps = read_steps(generation, whole)
        except (FormatError, DeviceError) as error:
            yield self._segment_finding("journal", journal, error)
            return
        for step in steps:
            self._space = DataSpace(geometry, tuple(data.take_all(step.header.chunk_count)))
            try:
                directory, _ = load_step(generation, whole, step)
            except (FormatError, DeviceError) as error:
                yield self._segment_finding("journal", journal, error)
                continue
            with directory:
                yield from self._check_copies(
                    directory,
                    lambda part, base=done: progress(base + part),  # type: ignore[misc]
                )
            done += self._space.size_bytes * geometry.replicas
        yield from self._check_journal_copies(journal)

    def _check_journal_copies(self, journal: DataSpace) -> Iterator[Finding]:
        if journal.geometry.replicas > 1 and journal.size_bytes:
            correct = np.concatenate(
                [window.memory.copy() for window in scan_space(self._generation.sources, journal)]
            )
            yield from self._compare_segments("journal", journal, correct)


@dataclass(frozen=True, slots=True)
class _Damage:
    """A damaged sample, or a damaged part of one larger than a chunk.

    Attributes:
        index: index of the sample.
        offset_bytes: first byte of the damaged part in the sample.
        length_bytes: length of the damaged part.
        address: address of the damaged part in the data space.
        reason: description of the damage.
    """

    index: int
    offset_bytes: int
    length_bytes: int
    address: int
    reason: str


def _touches(failure: FailedRead, addresses: Int64Array, lengths: Int64Array) -> NDArray[np.bool_]:
    """Return a mask of the ranges with bytes in a range that could not be read."""
    end = failure.address + failure.length_bytes
    touched: NDArray[np.bool_] = (addresses < end) & (addresses + lengths > failure.address)
    return touched


def _failed_read(window: Window, ranges: CheckedRanges, number: int) -> str | None:
    failure = window.failure_at(int(ranges.addresses[number]), int(ranges.lengths[number]))
    return None if failure is None else str(failure.error)
