"""Files under one folder, read as samples: what sources that name files have in common.

Files are in a table: names in one byte string, and 48 bytes of numbers each. They are looked at
together, by several threads, before anything is written: sizes for the space check, and what may
not be read. Every open is relative to the folder's descriptor, so a path may be as long as a
sample's path, however long the folder's own is.

They are then read by several threads in libdlfs, a buffer at a time, checked before and after
against what was seen first, so that a file that changes during the import is an error. Within a
buffer they are read in the table's order, wherever they go, because files that were made together
lie together on the disk.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs._native.files import FILE_DTYPE, read_files, stat_files
from dlfs._native.library import describe
from dlfs.arguments import Layout
from dlfs.errors import DeviceError, DlfsError, NotFoundError, UsageError
from dlfs.ingest.order import packing_order, take_block
from dlfs.ingest.source import BUFFER_BYTES, THREADS, SampleBlock, read_ahead, show


class FileTable:
    """Files in the order of the source; ``files`` once ``look`` has been called."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._positions = array("Q")
        self.names = np.empty(0, np.uint8)
        self.files = np.empty(0, FILE_DTYPE)

    def __len__(self) -> int:
        return len(self._positions)

    def add(self, path: bytes) -> None:
        """Add a file by its path in the folder, without NUL."""
        self._positions.append(len(self._text))
        self._text += path
        self._text.append(0)

    def path(self, index: int) -> bytes:
        """The path of a file."""
        first = self._positions[index]
        return bytes(self._text[first : self._text.index(0, first)])

    def look(self, directory: int, *, follow_links: bool, threads: int) -> int | None:
        """Look at every file; return the index of one that cannot be taken."""
        self.names = np.frombuffer(self._text, np.uint8)
        self.files = np.zeros(len(self), FILE_DTYPE)
        self.files["position"] = np.frombuffer(self._positions, np.uint64)
        failed = stat_files(
            directory, self.names, self.files, follow_links=follow_links, threads=threads
        )
        return int(np.flatnonzero(self.files["code"])[0]) if failed else None


class FileReader:
    """Reads the files of a table.

    Args:
        directory: descriptor of the folder; the caller closes it.
        folder: its name, for errors.
        table: of the files; it is complete.
        attributes: of the samples, an array with a value for each file.
        follow_links: whether a path may end in a symbolic link.
        buffer_bytes: of each of the two buffers.
        threads: that read files, 1..64.

    Raises:
        DeviceError: a file is not there, is none, or may not be read.
    """

    def __init__(
        self,
        directory: int,
        folder: str,
        table: FileTable,
        *,
        attributes: Mapping[str, npt.NDArray[Any]] | None = None,
        follow_links: bool,
        buffer_bytes: int = BUFFER_BYTES,
        threads: int = THREADS,
    ) -> None:
        self._directory = directory
        self._folder = folder
        self._table = table
        self._attributes = attributes or {}
        self._follow_links = follow_links
        self._buffer_bytes = buffer_bytes
        self._threads = threads
        self._look()
        self.sizes = np.ascontiguousarray(table.files["length_bytes"])

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Read every file once; see ``Source.blocks``.

        Raises:
            DeviceError: a file cannot be read, or has changed.
        """
        order = packing_order(len(self.sizes), layout=layout, seed=seed)
        position = 0

        def fill(buffer: npt.NDArray[np.uint8]) -> SampleBlock | None:
            nonlocal position
            if position == len(order):
                return None
            indices, offsets = take_block(order, self.sizes, position, len(buffer))
            position += len(indices)
            return self._read(indices, offsets, buffer)

        return read_ahead(fill, buffer_bytes=self._buffer_bytes)

    def _read(
        self,
        indices: npt.NDArray[np.uint64],
        offsets: npt.NDArray[np.int64],
        buffer: npt.NDArray[np.uint8],
    ) -> SampleBlock:
        table, in_order = self._table, np.argsort(indices)
        lengths = self.sizes[indices].astype(np.int64)
        if int(lengths[-1]) > len(buffer):
            buffer = np.empty(int(lengths[-1]), np.uint8)
        chosen = indices[in_order]
        files = table.files[chosen]
        files["buffer_offset"] = offsets[in_order]
        if read_files(
            self._directory,
            table.names,
            files,
            buffer,
            follow_links=self._follow_links,
            threads=self._threads,
        ):
            bad = int(np.flatnonzero(files["code"])[0])
            raise self._failure(int(chosen[bad]), int(files["code"][bad]))
        attributes = {name: values[indices] for name, values in self._attributes.items()}
        paths = [table.path(i) for i in indices.tolist()]
        return SampleBlock(paths, buffer, offsets, lengths, attributes)

    def _look(self) -> None:
        bad = self._table.look(
            self._directory, follow_links=self._follow_links, threads=self._threads
        )
        if bad is not None:
            path, code = self._table.path(bad), int(self._table.files["code"][bad])
            why = "the file may not be read" if code == -errno.EACCES else describe(code)
            raise DeviceError(f"import {join_shown(self._folder, path)}: {why}", -code)

    def _failure(self, index: int, code: int) -> DlfsError:
        path, size = join_shown(self._folder, self._table.path(index)), int(self.sizes[index])
        if code in (-errno.ESTALE, -errno.ENOENT, -errno.ELOOP):
            return DeviceError(
                f"import {path}: the file changed during the import (it had {size} bytes)",
                errno.ESTALE,
            )
        return DeviceError(f"import {path}: read {size} bytes: {describe(code)}", -code)


def join_shown(folder: str, path: bytes) -> str:
    """A file in a folder, for a message."""
    return show(os.fsencode(folder).rstrip(b"/") + b"/" + path)


def open_folder(folder: str) -> int:
    """Open a folder that files are opened relative to.

    Raises:
        NotFoundError: there is no such folder.
        UsageError: it is no folder.
        DeviceError: it cannot be opened.
    """
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFoundError(f"import {folder}: there is no such folder") from error
    except NotADirectoryError as error:
        raise UsageError(f"import {folder}: expected a folder") from error
    except OSError as error:
        raise DeviceError(f"import {folder}: {error.strerror}", error.errno or errno.EIO) from error
