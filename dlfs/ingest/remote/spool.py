"""The spool directory of a source: local copies of the objects that its URLs name.

A source has a folder of its own in the spool directory, named by a hash of its URLs::

    manifest.jsonl    a line for each complete object or piece; see ``manifest``
    blocks/N          objects that are samples, in blocks; see ``blocks``
    parts/            other objects that are not complete, by key
    files/N/NAME...   complete ones of the N-th URL, under their own names

An import that fails or is killed leaves the folder. The same import then lists the objects anew,
compares what it has with the manifest, and fetches only what is missing or has changed. The folder
is deleted when the dataset is sealed. One import at a time uses it, under a lock.

``fetch`` copies all objects, for which the directory must have room. ``fetch_in_order`` copies some
of them while others are imported: the copies that exist are bounded, and those whose samples an
import has committed are deleted. In place of a copy that is not there, a folder of objects has an
empty file of its size, which takes no space: so it can be walked. ``fetch_blocks`` does so without
a file for each object.

The folder belongs to the user alone, with mode 0700, and no link in it is followed. Passwords and
queries of URLs are in none of its files.

Memory: about 2 kB for each object while they are listed, and the requests in flight.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import shutil
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dlfs._native.handle import Descriptor
from dlfs.base.closing import closed_on_error
from dlfs.base.threads import map_waiting
from dlfs.base.units import MIB
from dlfs.base.wording import redact
from dlfs.errors import DlfsError, FormatError, LockedError, SpaceError
from dlfs.ingest.patterns import expand_braces
from dlfs.ingest.progress import Meter, ProgressCallback
from dlfs.ingest.remote.blocks import Block, BlockCopies, BlockDivision
from dlfs.ingest.remote.digests import file_crc
from dlfs.ingest.remote.failures import disk_errors
from dlfs.ingest.remote.fetching import Fetch, Fetcher, FileCopies
from dlfs.ingest.remote.manifest import Manifest, object_key
from dlfs.ingest.remote.private_directory import open_private_directory
from dlfs.ingest.remote.stores import REQUESTS, RemoteObject, Store, open_store
from dlfs.ingest.remote.urls import base_name, is_http
from dlfs.ingest.source import Bytes, fingerprint_of

RESERVE_BYTES = 64 * MIB
"""Bytes that a fetch leaves free on the spool directory's file system."""


def default_directory() -> str:
    """Return the spool directory of a user: ``dlfs/spool`` in the cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(cache) / "dlfs" / "spool")


@dataclass(frozen=True, slots=True)
class Root:
    """What one URL names.

    Attributes:
        path: path that its local copy has, or would have.
        is_folder: True if it is a folder of objects.
        objects: the objects.
    """

    path: str
    is_folder: bool
    objects: Sequence[Fetch]

    @property
    def name(self) -> str:
        """Name of the copy."""
        return os.path.basename(self.path)


class Spool:
    """Local copies of the objects that some URLs name.

    Args:
        urls: URLs of objects and folders; braces and globs stand for several.
        directory: the spool directory; None for ``default_directory``.
        part: description of the part of a source whose objects are wanted; empty for all.

    Raises:
        LockedError: another import of the same URLs, or of the same part, runs.
        UsageError: a URL's package is not installed.
        DlfsError: the directory cannot be written.
    """

    def __init__(self, urls: Sequence[str], directory: str | None, part: bytes = b"") -> None:
        text = "\0".join(urls).encode("utf-8", "surrogateescape")
        name = hashlib.sha256(text + (b"\0\0" + part if part else b"")).hexdigest()[:16]
        self._urls = urls
        self.folder = str(Path(directory or default_directory()).absolute() / name)
        self.sources: list[str] = []
        """The URLs, with those that braces and globs stand for."""
        self.paths: list[str] = []
        """Path of the local copy of each of ``sources``."""
        self.copies: dict[str, list[str]] = {}
        """Paths of the local copies of what each of the URLs stands for."""
        self.fingerprint = ""
        """Differs for other objects, and for objects that changed; known once they were fetched, or
        for a bounded spool once they were listed."""
        self.objects: list[Fetch] = []
        """The objects, once they were listed, in the order of the URLs."""
        self.roots: list[Root] = []
        """What each of ``sources`` names."""
        self._blocks: BlockCopies | None = None
        self._fetcher: Fetcher | None = None
        self._ends: list[int] = []
        self._first = self._committed = 0
        self._action = f"import {redact(urls[0])}: use the spool directory"
        self._lock = open_private_directory(self.folder, self._action)
        with closed_on_error(self._lock):
            self._take_lock()
            for name in ("blocks", "parts", "files"):
                open_private_directory(f"{self.folder}/{name}", self._action).close()
            with disk_errors(self.folder):
                self._manifest = Manifest(f"{self.folder}/manifest.jsonl")

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of all objects."""
        return sum(one.item.size_bytes for one in self.objects)

    def find(self) -> None:
        """List the objects; called once, before all that follows.

        Raises:
            NotFoundError: a URL names nothing.
            FormatError: two objects would get one path.
            DlfsError: a store cannot be read.
        """
        self.roots = self._list()
        self.objects = [one for root in self.roots for one in root.objects]
        _check_targets(self.objects, self.folder)

    def take(
        self, urls: Sequence[str], items: Sequence[tuple[int, RemoteObject]], *, has_files: bool
    ) -> None:
        """Take objects that another process has listed, in place of ``find``.

        Args:
            urls: the URLs that name the objects.
            items: the objects, each with the number of its URL.
            has_files: True if each object gets a file of its own, whose folder is then made.

        Raises:
            DlfsError: a store cannot be opened.
        """
        stores = [open_store(url) for url in urls]
        self.sources = list(urls)
        self.paths = [
            f"{self.folder}/files/{number}/{base_name(url)}" for number, url in enumerate(urls)
        ]
        times: Counter[str] = Counter()
        self.objects = [
            self._fetch(stores[number], item, self.paths[number], times) for number, item in items
        ]
        _check_targets(self.objects, self.folder)
        self.fingerprint = fingerprint_of([one.key for one in self.objects])
        if has_files:
            with disk_errors(self.folder):
                self._make_folders(self.objects)

    def entries(self) -> dict[str, list[str] | None]:
        """Return the names in each folder that a URL names, by its path; None for an object."""
        return {
            root.path: (
                sorted({one.item.name.partition("/")[0] for one in root.objects})
                if root.is_folder
                else None
            )
            for root in self.roots
        }

    def make_folders(self) -> None:
        """Look up the sizes that listings do not have, and make the folders of all copies.

        Raises:
            DlfsError: a store or the directory cannot be read.
        """
        self.roots = [replace(root, objects=_look_up(root.objects)) for root in self.roots]
        self.objects = [one for root in self.roots for one in root.objects]
        with disk_errors(self.folder):
            self._make_folders(self.objects)

    def fetch(self, progress: ProgressCallback | None = None) -> None:
        """Fetch the objects that are missing; called once.

        Args:
            progress: called when an object is complete, and once at the start.

        Raises:
            SpaceError: the file system has too little free space for the objects.
            DlfsError: as ``Fetcher.wait``.
        """
        wanted = self.objects
        with disk_errors(self.folder):
            missing = [one for one in wanted if not self._is_complete(one)]
            self._check_space(sum(one.item.size_bytes for one in missing))
            sizes = [one.item.size_bytes for one in wanted]
            left = [one.item.size_bytes for one in missing]
            meter = Meter(progress, len(wanted), sum(sizes))
            meter.add(len(wanted) - len(missing), sum(sizes) - sum(left))
            fetcher = Fetcher(missing, self._manifest, meter, FileCopies())
            try:
                fetcher.run()
            finally:
                fetcher.close()
            crcs = self._manifest.objects
            found = [(one.target[len(self.folder) :], one.key, crcs[one.key]) for one in wanted]
            self.fingerprint = fingerprint_of(sorted(found))

    def urls_of(self, objects: Sequence[Fetch]) -> list[str]:
        """Return the URL of ``sources`` that names each object, or its folder."""
        found = {
            one.key: url
            for url, root in zip(self.sources, self.roots, strict=True)
            for one in root.objects
        }
        return [found[one.key] for one in objects]

    # ---- within a bound --------------------------------------------------------------------------

    def objects_of(self, paths: Sequence[str]) -> Sequence[Fetch] | None:
        """Return the objects whose copies have some paths; None if others do."""
        known = {one.target: one for one in self.objects}
        return [known[path] for path in paths] if known.keys() >= set(paths) else None

    def prepare(self, limit_bytes: int) -> None:
        """Give all objects whose copies are missing an empty file of their size.

        Args:
            limit_bytes: most bytes of copies.

        Raises:
            SpaceError: the file system has less free space than the bound.
            DeviceError: the files cannot be made.
        """
        self.fingerprint = fingerprint_of(limit_bytes, sorted(one.key for one in self.objects))
        with disk_errors(self.folder):
            missing = [one for one in self.objects if not self._is_complete(one)]
            self._check_space(min(limit_bytes, sum(one.disk_bytes for one in missing)))
            for one in missing:
                if one.key in self._manifest.objects:  # its copy is damaged, or gone
                    self._manifest.append(one.key, dropped=True)
                _make_hole(one)

    def fetch_in_order(
        self, objects: Sequence[Fetch], first: int, ends: Sequence[int], limit_bytes: int
    ) -> None:
        """Begin to fetch objects, in the order in which they are imported; called once.

        Args:
            objects: the objects.
            first: number of those that an import has committed.
            ends: where the objects are divided: ``delete_committed`` has to be called when those
                before each of these numbers are committed, from ``first`` on, as further ones have
                no room.
            limit_bytes: most bytes of copies; a larger object is the only one.
        """
        sizes = np.array([one.disk_bytes for one in objects], np.int64)
        self._ends = [*ends, len(objects)]
        self._objects = objects
        self._first = self._committed = first
        with disk_errors(self.folder):
            fit = first + int(np.searchsorted(np.cumsum(sizes[first:]), limit_bytes, "right"))
            fitting = {one.key for one in objects[first:fit]}
            for one in self.objects:  # also copies of an import in another order
                if one.key not in fitting:
                    self._drop(one)
            for name in set(os.listdir(f"{self.folder}/parts")) - fitting:
                os.unlink(f"{self.folder}/parts/{name}")
        self._fetcher = Fetcher(
            objects[first:],
            self._manifest,
            Meter(None, None, None),
            FileCopies(limit_bytes, fitting & self._manifest.objects.keys()),
        )
        self._fetcher.start()

    def wait(self, count: int) -> None:
        """Wait for the copies of the first objects in the order; see ``Fetcher.wait``."""
        assert self._fetcher is not None
        with disk_errors(self.folder):
            self._fetcher.wait(count - self._first)

    def fetch_blocks(
        self,
        objects: Sequence[Fetch],
        plan: str,
        division: BlockDivision,
        passed: int,
        limit_bytes: int,
    ) -> None:
        """Begin to fetch objects in the order in which they are imported; called once.

        Args:
            objects: the objects, from the first one of a block on.
            plan: differs for other objects, in another order, or divided otherwise.
            division: divides them.
            passed: number of the first of these that an import has committed.
            limit_bytes: most bytes of copies; a larger object is the only one.

        Raises:
            SpaceError: the file system has less free space than the bound.
            DeviceError: the files of an earlier run cannot be deleted.
        """
        with disk_errors(self.folder):
            folder = self._open_blocks(plan, division.blocks[0].first)
            sizes = [max(0, one.item.size_bytes) for one in objects]
            present = sum(entry.stat().st_blocks * 512 for entry in os.scandir(folder))
            self._check_space(min(limit_bytes, sum(sizes)) - present)
        self._blocks = BlockCopies(
            folder, self._manifest, division, len(objects), passed, limit_bytes
        )
        self._fetcher = Fetcher(objects, self._manifest, Meter(None, None, None), self._blocks)
        self._fetcher.start()

    def wait_for_block(self, *, begins_group: bool) -> Block:
        """Wait until the next block is complete, and return it.

        Args:
            begins_group: True to return it also when it is known that a step ends before it.

        Raises:
            DlfsError: see ``Fetcher.wait_for``.
        """
        assert self._blocks is not None
        assert self._fetcher is not None
        blocks = self._blocks

        def is_ready() -> bool:
            block = blocks.next_block
            return block is not None and (
                block.is_complete or (begins_group and block.begins_group)
            )

        with self.note_on_error(), disk_errors(self.folder):
            self._fetcher.wait_for(is_ready)
        assert blocks.next_block is not None
        return blocks.next_block

    def take_block(self, block: Block, buffer: Bytes) -> None:
        """Read the next block, which is complete, into a buffer of its size."""
        assert self._blocks is not None
        self._blocks.take(block, buffer)

    def end_group(self) -> None:
        """Take note that a step ends behind the blocks that were taken."""
        assert self._blocks is not None
        self._blocks.end_group()

    def delete_committed(self) -> None:
        """Delete the copies up to the next place at which the objects are divided."""
        assert self._fetcher is not None
        if self._blocks is not None:
            self._fetcher.release(self._blocks.delete_group())
            return
        end = self._ends[bisect(self._ends, self._committed)]
        with disk_errors(self.folder):
            for one in self._objects[self._committed : end]:
                self._drop(one)
                self._fetcher.release(one.disk_bytes)
        self._committed = end

    def note_facts(self, fetch: Fetch, facts: Mapping[str, Any]) -> None:
        """Keep what an import has found in an object, for one that goes on; values of JSON."""
        with disk_errors(self.folder):
            self._manifest.append(fetch.key, facts=facts)

    def facts_of(self, fetch: Fetch) -> Mapping[str, Any]:
        """Return what an import has found in an object; empty if none has read it."""
        return self._manifest.facts.get(fetch.key, {})

    def cancel(self) -> None:
        """End all waits for copies."""
        if self._fetcher is not None:
            self._fetcher.cancel()

    def _drop(self, fetch: Fetch) -> None:
        """Delete the copy of an object, if it is there."""
        if fetch.key in self._manifest.objects:
            self._manifest.append(fetch.key, dropped=True)
            _make_hole(fetch)

    # ---- the end ---------------------------------------------------------------------------------

    def remove(self) -> None:
        """Delete the local copies, after the import has succeeded."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def discard(self) -> None:
        """End the fetch, and delete the local copies."""
        if self._fetcher is not None:
            self._fetcher.close()
        self.remove()
        self.close()

    def close(self) -> None:
        """Unlock the folder, or delete it if it has nothing; closing it again does nothing."""
        if self._fetcher is not None:
            self._fetcher.close()
        self._manifest.close()
        if self._lock.value >= 0:
            if self._manifest.is_empty:
                self.remove()
            fcntl.flock(self._lock.value, fcntl.LOCK_UN)  # a child may have a copy of it
        self._lock.close()

    @contextmanager
    def note_on_error(self) -> Iterator[None]:
        """Add to an error where the local copies are that the same import goes on with."""
        try:
            yield
        except DlfsError as error:
            if not self._manifest.is_empty:
                error.add_note(f"the same import goes on with what is in {self.folder}")
            raise

    @contextmanager
    def named(self) -> Iterator[None]:
        """Put URLs in place of the paths of their local copies in the messages of errors."""
        try:
            yield
        except DlfsError as error:
            error.args = tuple(
                self.show(one) if isinstance(one, str) else one for one in error.args
            )
            raise

    def show(self, text: str) -> str:
        """Return a text with URLs in place of the paths of their local copies."""
        for path, url in zip(self.paths, self.sources, strict=True):
            text = text.replace(path, redact(url).rstrip("/"))
        return redact(text)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock.value, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LockedError(
                f"import {redact(self._urls[0])}: another import of the same source runs, in "
                f"{self.folder}"
            ) from error

    def _list(self) -> list[Root]:
        """List all objects, in the order of the URLs."""
        found: list[Store] = []
        for pattern in self._urls:
            first = len(self.paths)
            for name in expand_braces(pattern):
                store = open_store(name)
                has_magic = glob.has_magic(name) and not is_http(name)
                for url in store.match(name) if has_magic else [name]:
                    self.paths.append(f"{self.folder}/files/{len(found)}/{base_name(url)}")
                    self.sources.append(url)
                    found.append(store)
            self.copies[pattern] = self.paths[first:]
        pairs = list(zip(found, self.sources, strict=True))
        listed = map_waiting(lambda pair: pair[0].find(pair[1]), pairs, REQUESTS)
        roots = []
        times: Counter[str] = Counter()
        for store, path, items in zip(found, self.paths, listed, strict=True):
            is_folder = any(item.name for item in items)
            fetches = [self._fetch(store, item, path, times) for item in items]
            roots.append(Root(path, is_folder, fetches))
        return roots

    def _fetch(self, store: Store, item: RemoteObject, root: str, times: Counter[str]) -> Fetch:
        key = object_key(item.url, item.size_bytes, item.version)
        times[key] += 1
        if times[key] > 1:  # two SOURCEs name it, and each has its copy
            key = f"{key}-{times[key]}"
        target = f"{root}/{item.name}" if item.name else root
        return Fetch(store, item, key, f"{self.folder}/parts/{key}", target)

    def _open_blocks(self, plan: str, first: int) -> str:
        """Return the folder of the blocks of a plan, without those that an import has committed."""
        folder = f"{self.folder}/blocks"
        for name in set(os.listdir(folder)) - {plan}:  # of an import in another order
            shutil.rmtree(f"{folder}/{name}")
        if not os.path.exists(f"{folder}/{plan}"):
            self._manifest.versions.clear()  # nothing is there, and objects may have changed
        open_private_directory(f"{folder}/{plan}", self._action).close()
        for name in os.listdir(f"{folder}/{plan}"):
            if int(name) < first:
                os.unlink(f"{folder}/{plan}/{name}")
        return f"{folder}/{plan}"

    def _make_folders(self, wanted: Sequence[Fetch]) -> None:
        """Make the folders of all objects; delete files that the listing does not have."""
        targets = {one.target for one in wanted}
        keys = {one.key for one in wanted}
        for root, folders, names in os.walk(f"{self.folder}/files", topdown=False):
            links = [name for name in folders if os.path.islink(f"{root}/{name}")]
            for name in (*names, *links):
                if name in links or f"{root}/{name}" not in targets:
                    os.unlink(f"{root}/{name}")
            if root != f"{self.folder}/files" and not os.listdir(root):
                os.rmdir(root)
        for name in os.listdir(f"{self.folder}/parts"):
            if name not in keys:
                os.unlink(f"{self.folder}/parts/{name}")
        for folder in {os.path.dirname(target) for target in targets}:
            os.makedirs(folder, mode=0o700, exist_ok=True)

    def _is_complete(self, fetch: Fetch) -> bool:
        """Return True if an earlier run has fetched an object and its copy is not damaged."""
        expected = self._manifest.objects.get(fetch.key)
        if expected is None:
            return False
        if os.path.exists(fetch.part):  # killed between its record and its name
            os.rename(fetch.part, fetch.target)
        with Descriptor() as file:
            try:
                file.fill(os.open, fetch.target, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return False
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                os.unlink(fetch.target)  # a link; the object is fetched again
                return False
            size = os.fstat(file.value).st_size
            return size == fetch.item.size_bytes and file_crc(file.value, 0, size) == expected

    def _check_space(self, needed: int) -> None:
        needed -= sum(entry.stat().st_blocks * 512 for entry in os.scandir(f"{self.folder}/parts"))
        needed = max(0, needed) + RESERVE_BYTES
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise SpaceError(
                f"import {redact(self._urls[0])}: expected {needed} bytes free for local copies in "
                f"the spool directory {os.path.dirname(self.folder)}, of which it leaves "
                f"{RESERVE_BYTES} free, got {free}; spool=DIRECTORY names another"
            )


def delete_copies(urls: Sequence[str], directory: str | None) -> None:
    """Delete the local copies for an import of some URLs that nothing goes on with.

    Args:
        urls: the URLs.
        directory: the spool directory; None for ``default_directory``.

    Raises:
        LockedError: another import of the same URLs runs.
        DlfsError: the directory cannot be read.
    """
    copies = Spool(urls, directory)
    with closing(copies):
        copies.remove()


def _make_hole(fetch: Fetch) -> None:
    """Put an empty file of its size in the place of an object's copy; it takes no space."""
    if os.path.islink(fetch.target):
        os.unlink(fetch.target)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with Descriptor() as file:
        file.fill(os.open, fetch.target, flags, 0o600)
        os.ftruncate(file.value, fetch.item.size_bytes)


def _check_targets(wanted: Sequence[Fetch], folder: str) -> None:
    """Check that every local copy can have its path.

    Raises:
        FormatError: two objects have one path, or one has the path of a folder of others.
    """
    targets: dict[str, str] = {}
    for one in wanted:
        if one.target in targets:
            raise FormatError(
                f"import {one.item.shown}: expected objects of different paths, got that of "
                f"{targets[one.target]}"
            )
        targets[one.target] = one.item.shown
    for above in {os.path.dirname(target) for target in targets}:
        while len(above) > len(folder):
            if above in targets:
                raise FormatError(
                    f"import {targets[above]}: expected a folder or an object of this name, "
                    "got both"
                )
            above = os.path.dirname(above)


def _look_up(objects: Sequence[Fetch]) -> list[Fetch]:
    """Return the objects of a URL with their sizes."""
    items = objects[0].store.look_up_now([one.item for one in objects])
    return [replace(one, item=item) for one, item in zip(objects, items, strict=True)]
