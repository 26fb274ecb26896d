"""Files that programs write through fsspec: each becomes one sample when it is closed.

The bytes wait in memory, or in a temporary file if they are many. The close of the file adds them
to the dataset as a new version, in one commit. Before that nothing of the file is on the volume.
The bytes are discarded if a ``with`` statement of the file is left by an exception, by ``discard``,
and if the file is never closed. Every other close commits them, also in ``except`` and ``finally``.

- A path in a dataset that does not exist makes the dataset.
- Another path in a dataset makes a version that shares the other samples (``Volume.append``).
- An existing path is replaced if it is the only one of its dataset, by a version with the new
  bytes. In a dataset with other samples it is refused with EEXIST.

Readers have the old version or the new one. Earlier versions stay, unless ``keep_versions`` says
otherwise.

Threads: one at a time for each file. Memory: ``BUFFER_BYTES`` for each file.
"""

from __future__ import annotations

import dis
import errno
import io
import logging
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dlfs
from dlfs.adapters.files import OpenVolume, raw_path
from dlfs.base.wording import list_names
from dlfs.errors import ClosedError, ExistsError, LockedError, UsageError
from dlfs.format.names import new_dataset_name
from dlfs.format.paths import path_bytes
from dlfs.store.locking import when_unlocked

if TYPE_CHECKING:
    from typing_extensions import Buffer

BUFFER_BYTES = 64 << 20
"""Most bytes of a new file that wait in memory; more wait in a temporary file, in bytes."""

_LEAVING_WITH = dis.opmap["WITH_EXCEPT_START"]
"""Instruction by which a ``with`` statement that is left by an exception calls ``__exit__``."""

_log = logging.getLogger("dlfs.fsspec")


@dataclass(frozen=True, slots=True)
class NewSample:
    """The place of a new file.

    Attributes:
        volume: volume to write to.
        path: path in the file system, for messages.
        dataset: name of the dataset.
        inner: path within the dataset.
        lock_timeout_s: time to wait while another writer has the volume, in seconds.
        keep_versions: versions of the dataset that stay, >= 1; None for all.
    """

    volume: OpenVolume
    path: str
    dataset: str
    inner: str
    lock_timeout_s: float
    keep_versions: int | None

    def check(self, *, exclusive: bool) -> None:
        """Check that the file can be created now.

        Args:
            exclusive: True if it must not exist.

        Raises:
            OSError: EROFS for a volume behind a service; EISDIR if the path is a dataset or a
                directory; EEXIST if it may not be replaced.
            UsageError: a dataset or a sample may not have this name, or the samples of the dataset
                have attributes.
            DegradedError: a member of the volume is missing.
        """
        volume = self.volume.volume
        if volume.uri.startswith("unix:"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), self.path)
        if not self.inner:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
        new_dataset_name(self.dataset)
        path_bytes(raw_path(self.inner))
        volume.check_writable()
        volume.refresh()
        self._replaces(exclusive=exclusive)

    def _replaces(self, *, exclusive: bool) -> bool:
        """Return True if the file replaces the whole dataset, or makes it.

        Raises:
            OSError: EISDIR or EEXIST, as ``check``.
        """
        volume, raw = self.volume.volume, raw_path(self.inner)
        if self.dataset not in volume:
            return True
        with volume.dataset(self.dataset) as dataset:
            if int(dataset.index_of([raw])[0]) < 0:
                if dataset.directory.is_directory(raw):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
                self._check_columns(dataset)
                return False
            if exclusive or len(dataset) > 1:
                raise self._exists()
        return True

    def _check_columns(self, dataset: dlfs.Dataset) -> None:
        if len(dataset) and dataset.columns:
            raise UsageError(
                f"write {self.path!r}: expected a dataset without attributes, got "
                f"{list_names(dataset.columns)}, for which a file has no values; add the sample by "
                "Volume.append"
            )

    def _exists(self) -> FileExistsError:
        reason = "a sample is replaced only if it is the only one of its dataset"
        return FileExistsError(errno.EEXIST, reason, self.path)

    def commit(self, data: Buffer, *, exclusive: bool) -> None:
        """Write the sample, and make it visible.

        Raises:
            OSError: EISDIR or EEXIST, as ``check``.
            DlfsError: as ``Volume.append`` and ``DatasetWriter.seal``; the volume is unchanged.
        """
        writer = when_unlocked(lambda: self._lock(exclusive), self.lock_timeout_s)
        try:
            with writer:
                writer.add(raw_path(self.inner), data)
        except ExistsError as error:
            raise self._exists() from error
        if self.keep_versions is not None:
            volume, keep = self.volume.volume, self.keep_versions
            try:
                when_unlocked(lambda: volume.prune(self.dataset, keep=keep), self.lock_timeout_s)
            except LockedError as error:  # the file is committed
                _log.warning("old versions of %s stay until the next file: %s", self.dataset, error)
        self.volume.refresh()

    def _lock(self, exclusive: bool) -> dlfs.DatasetWriter:
        """Return a writer that was started on the newest version."""
        volume = self.volume.volume
        while True:
            volume.refresh()
            seen = volume.generation
            if not self._replaces(exclusive=exclusive):
                return volume.append(self.dataset, layout="path")
            writer = volume.writer(self.dataset, layout="path")
            try:
                volume.refresh()
            except BaseException:
                writer.abort()
                raise
            if volume.generation == seen:
                return writer
            writer.abort()  # another writer was faster: its files must not be lost


class NewSampleFile(io.BufferedIOBase):
    """An open file that is being written; seekable, and readable as far as it was written.

    Args:
        sample: place of the file.
        exclusive: True if the path must not exist at the close.
        autocommit: False in a transaction of fsspec, which calls ``commit`` or ``discard``.

    Attributes:
        path: path of the file.
    """

    mode = "wb"

    def __init__(self, sample: NewSample, *, exclusive: bool, autocommit: bool) -> None:
        super().__init__()
        self.path = sample.path
        self._sample = sample
        self._exclusive = exclusive
        self._autocommit = autocommit
        self._left_before = _find_left_withs()
        self._buffer: Any = tempfile.SpooledTemporaryFile(BUFFER_BYTES)  # noqa: SIM115
        self._ended = False

    # ---- as a file -------------------------------------------------------------------------------

    def writable(self) -> bool:
        """Return True."""
        return True

    def readable(self) -> bool:
        """Return True: formats such as HDF5 read what they wrote."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Buffer) -> int:
        """Write bytes at the present position."""
        return self._call("write", data)  # type: ignore[no-any-return]

    def read(self, size: int | None = -1) -> bytes:
        """Read bytes that were written."""
        return self._call("read", -1 if size is None else size)  # type: ignore[no-any-return]

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Change the position."""
        self._call("seek", offset, whence)
        return self.tell()

    def tell(self) -> int:
        """Return the position."""
        return self._call("tell")  # type: ignore[no-any-return]

    def truncate(self, size: int | None = None) -> int:
        """Change the length; zeros fill a longer file."""
        position = self.tell()
        length = position if size is None else size
        self._call("truncate", length)
        if not self._buffer._rolled:  # memory is not extended by a truncation
            missing = length - self.seek(0, os.SEEK_END)
            if missing > 0:
                self.write(bytes(missing))
            self.seek(position)
        return length

    def _call(self, name: str, *arguments: Any) -> Any:
        if self.closed:
            raise ClosedError(f"write {self.path!r}: the file is closed")
        method: Callable[..., Any] = getattr(self._buffer, name)
        return method(*arguments)

    # ---- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Make the file visible, unless a transaction is in progress. Idempotent.

        A close by a ``with`` statement that an exception leaves discards the bytes.

        Raises:
            OSError, DlfsError: as ``NewSample.commit``; nothing of the file is on the volume.
        """
        if self.closed:
            return
        super().close()
        if not _find_left_withs() <= self._left_before:
            self.discard()
        elif self._autocommit:
            self.commit()

    def commit(self) -> None:
        """Write the bytes to the volume and make the file visible; fsspec's transactions call it.

        Raises:
            OSError, DlfsError: as ``NewSample.commit``.
        """
        if self._ended:
            return
        try:
            length = self._buffer.seek(0, os.SEEK_END) or self._buffer.tell()
            if not length:
                self._sample.commit(b"", exclusive=self._exclusive)
            elif not self._buffer._rolled:
                self._sample.commit(self._buffer._file.getvalue(), exclusive=self._exclusive)
            else:
                self._buffer.flush()
                with mmap.mmap(self._buffer.fileno(), length, access=mmap.ACCESS_READ) as memory:
                    self._sample.commit(memory, exclusive=self._exclusive)
        finally:
            self.discard()

    def discard(self) -> None:
        """Drop the bytes."""
        self._ended = True
        self._buffer.close()

    def __del__(self) -> None:
        # A file that was never closed is incomplete; the base class would close it.
        if not self.closed:
            self._autocommit = False
            self.discard()
            super().close()


def _find_left_withs() -> set[tuple[int, int]]:
    """Return the ``with`` statements that exceptions are leaving in this thread.

    fsspec's ``OpenFile``, text files, compressed files and other wrappers close the files below
    them at the end of a ``with`` statement, and do not say that an exception ends it. The
    interpreter knows: the frame of the statement is at the call of ``__exit__``. A handled
    exception alone says nothing, because programs save their state in ``except`` and ``finally``.

    Returns:
        Frame and offset of the instruction of each statement.
    """
    found = set()
    frame = sys._getframe(1) if sys.exc_info()[1] is not None else None
    while frame is not None:
        code = frame.f_code.co_code
        if frame.f_lasti >= 0 and code[frame.f_lasti] == _LEAVING_WITH:
            found.add((id(frame), frame.f_lasti))
        frame = frame.f_back
    return found
