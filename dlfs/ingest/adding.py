"""Adds the blocks of a source to a dataset writer, without the samples that the writer refuses.

A sample is refused if another one has its path, or a folder of that path has samples, or if its
attributes do not fit those of the samples before it. Unless bad records are allowed, this is an
error of the writer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from dlfs.dataset.part_writer import PartWriter
from dlfs.dataset.step_cutter import StepCutter
from dlfs.dataset.step_writer import StepWriter
from dlfs.dataset.writer import DatasetWriter
from dlfs.errors import ExistsError, LimitError, UsageError
from dlfs.format.bad_records import BadReport
from dlfs.ingest.bad_records import Name
from dlfs.ingest.source import SampleBlock, Source, choose_samples, show, slice_samples


class BlockAdder:
    """Adds blocks to a writer.

    Args:
        writer: the writer.
        source: the source of the blocks; it has the bad records.
    """

    def __init__(self, writer: DatasetWriter | StepWriter | PartWriter, source: Source) -> None:
        self._writer = writer
        self._name = source.name
        self._bad = source.bad
        self._bad.expect(source.sample_count)
        self._folders: set[bytes] = set()
        self._directory = None if writer.previous is None else writer.previous.directory
        if self._bad.are_allowed and isinstance(writer, StepCutter):
            for path in writer.kept_paths():
                self._folders.update(_folders(path, self._folders))

    def add(self, block: SampleBlock) -> tuple[int, int] | None:
        """Add a block; return the number of samples that were added, and their bytes.

        Of a block that has only a cursor, return None.

        Raises:
            TooManyBadError: more records are bad than allowed.
            DlfsError: as ``DatasetWriter.add_batch``.
        """
        if not block.paths and not block.attributes:
            self._end(block)
            return (0, 0) if block.ends_step else None
        if not self._bad.are_allowed:
            counts = self._add(block)
            if block.ends_step:
                self._end_step()
            return counts
        new = choose_samples(block, self._find_new(block.paths))

        def add(first: int, count: int) -> tuple[int, int]:
            return self._add(slice_samples(new, first, count))

        def name(index: int) -> Name:
            return self._name, os.fsdecode(new.paths[index])

        added = list(self._bad.each_part(len(new.paths), add, name, (UsageError, LimitError)))
        samples = sum(count for count, _ in added)
        self._bad.count_good(samples)
        self._end(block)
        return samples, sum(size_bytes for _, size_bytes in added)

    def _end(self, block: SampleBlock) -> None:
        """Note the cursor of a block whose samples were added, and what ends behind it."""
        if not isinstance(self._writer, StepCutter):
            return
        ends_part = self._ends_part(block)
        if self._bad.are_allowed:
            so_far = self._report()
            count = len(block.paths)
            self._writer.end_block(count, block.cursor, so_far, ends_part=ends_part)
        else:
            self._writer.note_cursor(block.cursor)
            if ends_part:
                self._writer.end_part()
        if block.ends_step:
            self._end_step()

    def _end_step(self) -> None:
        if isinstance(self._writer, StepCutter):
            self._writer.end_step()

    def _ends_part(self, block: SampleBlock) -> bool:
        """Return True if a part of the source ends behind a block, and no step has this end yet."""
        is_present = isinstance(self._writer, StepCutter) and self._writer.part == block.ends_part
        return is_present and block.ends_part is not None

    def finish(self) -> BadReport:
        """Give the writer the bad records when all blocks were added; return them.

        Raises:
            TooManyBadError: more records are bad than allowed.
        """
        self._bad.finish()
        report = self._bad.report()
        self._writer.bad += report
        return report

    def _report(self) -> BadReport:
        """Return the bad records so far; a worker of an import reports them as users see them."""
        return self._bad.report_since_opening(shown=isinstance(self._writer, PartWriter))

    def _add(self, block: SampleBlock) -> tuple[int, int]:
        samples = block.paths, block.data, block.offsets, block.lengths
        if isinstance(self._writer, StepCutter) and self._bad.are_allowed:
            self._writer.add_part(*samples, attributes=block.attributes)
        elif isinstance(self._writer, StepCutter):
            self._writer.add_batch(
                *samples,
                attributes=block.attributes,
                begins_chunk=block.begins_chunk,
                cursor=block.cursor,
                ends_part=self._ends_part(block),
            )
        else:
            self._writer.add_batch(
                *samples, attributes=block.attributes, begins_chunk=block.begins_chunk
            )
        return len(block.paths), int(block.lengths.sum())

    def _find_new(self, paths: list[bytes]) -> list[bool]:
        """Return True for each path that a sample can have; note the others."""
        found: list[bool] = []
        above_all = {one for path in paths for one in _folders(path, self._folders)}
        known = self._find_known([*paths, *above_all])
        for path in paths:
            folders = list(_folders(path, self._folders))
            above = next((one for one in folders if one in known), None)
            problem = ""
            if path in known:
                problem = "another sample has this path"
            elif path in self._folders or (self._directory and self._directory.is_directory(path)):
                problem = "other samples lie below this path"
            elif above is not None:
                problem = f"{show(above)} is a sample and cannot have samples below it"
            if problem:
                self._bad.note(self._name, os.fsdecode(path), ExistsError(problem))
            else:
                known.add(path)
                self._folders.update(folders)
            found.append(not problem)
        return found

    def _find_known(self, paths: list[bytes]) -> set[bytes]:
        """Return those of some paths that samples of the dataset have."""
        if isinstance(self._writer, StepCutter):
            return self._writer.find_known(paths)
        return {path for path in paths if path in self._writer}


def _folders(path: bytes, known: set[bytes]) -> Iterator[bytes]:
    """Yield the folders that a path lies in, from the inmost, up to the first that is known."""
    folder = path.rpartition(b"/")[0]
    while folder and folder not in known:
        yield folder
        folder = folder.rpartition(b"/")[0]


def check_labels(block: SampleBlock, labels: Mapping[str, int], where: str) -> None:
    """Check that classes have the labels that they have in the version appended to.

    A folder of classes numbers its own classes, so another folder may number them differently.
    """
    columns = block.attributes
    if not labels or "class" not in columns or "label" not in columns:
        return
    classes = {label: name for name, label in labels.items()}
    for name, label in set(zip(columns["class"].tolist(), columns["label"].tolist(), strict=True)):
        if labels.get(name, label) != label or classes.get(label, name) != name:
            raise UsageError(
                f"import {where}: expected the labels of the version appended to, got {label} for "
                f"class {name!r}; there it is {labels.get(name, 'none')}, and {label} is "
                f"{classes.get(label, 'none')!r}: import all classes as a new version"
            )
