"""Writes samples as files under a folder.

The writer opens directories one component at a time, relative to descriptors, and never follows a
symbolic link. So nothing lands outside the folder, whatever is in it already.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from dlfs._native.handle import Descriptor
from dlfs.errors import ExistsError
from dlfs.ingest.export.samples import ExportedSamples, export_failure
from dlfs.ingest.files import Directories
from dlfs.ingest.source import show

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_folder(samples: ExportedSamples, path: str, *, force: bool) -> None:
    """Write every sample as a file; see ``export_dataset``.

    Raises:
        ExistsError: a directory stands where a file has to be written.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        folder = _Folder(path, force=force)
    except OSError as error:
        raise export_failure(path, error) from error
    with contextlib.closing(folder):
        if not force and os.listdir(folder.root.value):
            raise ExistsError(
                f"export to {path}: expected an empty folder, got one with entries; "
                "force=True writes into it"
            )
        for sample, data in samples:
            folder.write(sample, data)
        for directory in samples.empty_directories():
            folder.make(directory)


class _Folder:
    """A folder to write files into, relative to its descriptor.

    In storage order, consecutive files may lie anywhere in the tree.
    """

    def __init__(self, path: str, *, force: bool) -> None:
        self._path = path
        self._force = force
        self.root = Descriptor()
        self.root.fill(os.open, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._directories = Directories(self.root.value, makes_missing=True)

    def close(self) -> None:
        self._directories.close()
        self.root.close()

    def write(self, path: bytes, data: memoryview) -> None:
        folder, _, name = path.rpartition(b"/")
        with self._failures(path):
            directory = self._directories.open(folder)
            with Descriptor() as file:
                try:
                    self._create(file, name, directory)
                    while data:
                        data = data[os.write(file.value, data) :]
                except BaseException:
                    if file.value >= 0:
                        os.unlink(name, dir_fd=directory)  # no incomplete file is left
                    raise

    def make(self, path: bytes) -> None:
        """Make a directory, unless it is there."""
        with self._failures(path):
            self._directories.open(path)

    @contextlib.contextmanager
    def _failures(self, path: bytes) -> Iterator[None]:
        """Name the path of a sample or directory in errors."""
        try:
            yield
        except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
            raise ExistsError(
                f"export to {self._path}: {show(path)}: another file or directory is in its way"
            ) from error
        except OSError as error:
            raise export_failure(f"{self._path}: {show(path)}", error) from error

    def _create(self, file: Descriptor, name: bytes, directory: int) -> None:
        try:
            file.fill(os.open, name, _NEW_FILE, 0o666, dir_fd=directory)
        except FileExistsError:
            if not self._force:
                raise
            os.unlink(name, dir_fd=directory)  # instead of writing through it: it may be a link
            file.fill(os.open, name, _NEW_FILE, 0o666, dir_fd=directory)
