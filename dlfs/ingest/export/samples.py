"""Samples of a dataset as an export reads them, and the files that an export writes.

``ExportedSamples`` gives the samples in storage order, batch by batch, while native threads read
the next batches ahead. So files and archive members are made in the volume's order, not in the
order of paths. ``whole_file`` gives a file its name when it is complete.

The first sample that cannot be read ends an export. If the caller passes ``on_bad``, such samples
are left out and counted instead.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dlfs.base.arguments import OnError
from dlfs.base.units import GIB, MIB
from dlfs.dataset.dataset import Dataset
from dlfs.errors import DlfsError, ExistsError, FormatError, write_error
from dlfs.format.paths import path_problem
from dlfs.ingest.progress import Meter, ProgressCallback
from dlfs.ingest.source import show
from dlfs.reader.batch import Batch

OnBad = Callable[[DlfsError], None]
"""Callback with the error of a sample that is left out; it names dataset, sample and location."""

BATCH_BYTES = 64 * MIB
"""Target size of a batch in bytes, computed with the mean length of samples."""
BATCH_BYTES_MAX = 1 * GIB
"""Most bytes of a batch of more than one sample."""
BATCH_SAMPLES_MAX = 4096


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Result of an export.

    Attributes:
        sample_count: number of samples written.
        sample_bytes: size of the samples written, in bytes.
        seconds: duration of the export.
        bad_count: number of samples left out because they could not be read.
    """

    sample_count: int
    sample_bytes: int
    seconds: float
    bad_count: int = 0


class ExportedSamples:
    """The samples of a dataset in storage order, read once.

    Args:
        dataset: dataset to read.
        progress: called after each batch, and once at the start.
        on_bad: called with the error of each sample that cannot be read, which is then left out;
            None raises the first such error.

    Threads: one.
    """

    def __init__(
        self, dataset: Dataset, progress: ProgressCallback | None, on_bad: OnBad | None
    ) -> None:
        self.dataset = dataset
        self._on_bad = on_bad
        self._bad_count = 0
        self._meter = Meter(progress, len(dataset), dataset.sample_bytes)

    def batches(self) -> Iterator[tuple[Batch, list[bytes | None]]]:
        """Yield all readable samples in batches; a batch is valid until the next one is taken.

        Yields:
            A batch, and the path of each of its samples; None for a sample whose path is bad.
        """
        on_error: OnError = "raise" if self._on_bad is None else "skip"
        size = batch_size(self.dataset)
        # All samples, under a launcher of several ranks as well.
        with self.dataset.batches(size, shuffle=None, on_error=on_error, world_size=1) as epoch:
            for batch in epoch:
                with batch:
                    for failure in batch.failures:
                        self._leave_out(failure.error())
                    paths = self._paths(batch.indices.tolist())
                    yield batch, paths
                    good = [path is not None for path in paths]
                    self._meter.add(sum(good), int(batch.lengths[good].sum()))

    def __iter__(self) -> Iterator[tuple[bytes, memoryview]]:
        """Yield every readable sample; its bytes are valid until the next one is taken."""
        for batch, paths in self.batches():
            for path, data in zip(paths, batch, strict=True):
                if path is not None:
                    yield path, data

    def empty_directories(self) -> list[bytes]:
        """Return the paths of directories without samples.

        Raises:
            FormatError: a path is invalid.
        """
        return [checked_path(path) for path in self.dataset.empty_directories()]

    def report(self) -> ExportReport:
        """Return the counts and the duration so far."""
        meter = self._meter
        return ExportReport(meter.samples, meter.bytes, meter.seconds, self._bad_count)

    def _paths(self, indices: list[int]) -> list[bytes | None]:
        found: list[bytes | None] = [None] * len(indices)
        with contextlib.suppress(FormatError):  # raised again for its own sample
            found[:] = self.dataset.paths_of(indices)
        return [self._path(index, path) for index, path in zip(indices, found, strict=True)]

    def _path(self, index: int, path: bytes | None) -> bytes | None:
        try:
            return checked_path(self.dataset.path(index) if path is None else path)
        except FormatError as error:
            name = self.dataset.name
            self._leave_out(
                FormatError(f"export sample {index} of dataset {name!r}: {error}"), error
            )
            return None

    def _leave_out(self, error: DlfsError, cause: DlfsError | None = None) -> None:
        if self._on_bad is None:
            raise error from cause
        self._bad_count += 1
        self._on_bad(error)


@contextlib.contextmanager
def whole_file(path: str, *, force: bool) -> Iterator[BinaryIO]:
    """Open a file that gets its name if the block ends without an error. An error removes it.

    Raises:
        ExistsError: the path exists.
        SpaceError: the file system is full.
        DeviceError: the file cannot be written.
    """
    if os.path.lexists(path) and not force:
        raise ExistsError(f"export to {path}: it is there already; force=True replaces it")
    partial = Path(path + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        if isinstance(error, DlfsError):
            raise
        raise export_failure(path, error) from error
    finally:
        partial.unlink(missing_ok=True)


def batch_size(dataset: Dataset) -> int:
    """Return the number of samples to read at once, so that batches stay within their limits."""
    if len(dataset) == 0:
        return 1
    mean = max(1, dataset.sample_bytes // len(dataset))
    longest = max(1, int(dataset.lengths().max()))
    return max(1, min(BATCH_SAMPLES_MAX, BATCH_BYTES // mean, BATCH_BYTES_MAX // longest))


def checked_path(path: bytes) -> bytes:
    """Check a path from media, which could lead out of the target.

    Raises:
        FormatError: the path is invalid for a sample.
    """
    problem = path_problem(path)
    if problem is not None:
        raise FormatError(f"export the sample {show(path)}: {problem}")
    return path


def export_failure(path: str, error: OSError) -> DlfsError:
    """Return the typed error of an export that cannot write."""
    return write_error(f"export to {path}: {error.strerror or error}", error.errno or 0)
