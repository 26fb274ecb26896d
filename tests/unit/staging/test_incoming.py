"""Requests below ``incoming`` for files that have lost their names, without a mount."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import dlfs
from dlfs.errors import StaleError
from dlfs.staging import entries, inode_table
from dlfs.staging.entries import Change, Owner
from dlfs.staging.incoming import IncomingTree, open_incoming
from dlfs.staging.inode_numbers import ROOT
from dlfs.staging.protocol import SealStatus
from dlfs.units import MIB
from tests.support import descriptors

OWNER = Owner(os.geteuid(), os.getegid())

Scenario = Callable[[IncomingTree, int, Path], Awaitable[None]]
"""A test's requests; called with the tree, a dataset's inode number, and its files in the area."""


def run(folder: Path, scenario: Scenario) -> None:
    """Run requests on a dataset, ``x``."""
    volume = folder / "volume.img"
    dlfs.format_volume(str(volume), size_bytes=16 * MIB)

    async def main() -> None:
        with (
            dlfs.open(str(volume)) as opened,
            open_incoming(opened, folder / "area") as tree,
        ):
            top = (await tree.mkdir(ROOT, b"x", 0o755, OWNER)).node
            await tree.getattr(top)  # opens the directory, which stays open
            await scenario(tree, top, folder / "area" / "datasets" / "x" / "files")

    trio.run(main)


async def replace(tree: IncomingTree, top: int) -> None:
    await tree.rename(top, b"new", top, b"name", 0)


async def remove(tree: IncomingTree, top: int) -> None:
    await tree.unlink(top, b"name")


LOSSES = (replace, remove)
"""Ways in which the file ``name`` loses its name."""


async def read(tree: IncomingTree, number: int) -> bytes:
    """Open a file by its inode number, read it and close it."""
    handle = (await tree.open(number, os.O_RDONLY, clears_ids=False)).handle
    try:
        return await tree.files.read(handle, 0, 100)
    finally:
        await tree.files.release(handle)


async def errno_of(call: Awaitable[object]) -> int:
    try:
        await call
    except StaleError:
        return errno.ESTALE
    except OSError as error:
        return error.errno or 0
    return 0


@pytest.mark.parametrize("lose", LOSSES)
def test_a_file_that_lost_its_name_stays_until_it_is_forgotten(
    tmp_path: Path, lose: Callable[[IncomingTree, int], Awaitable[None]]
) -> None:
    async def scenario(tree: IncomingTree, top: int, files: Path) -> None:
        (files / "name").write_bytes(b"old")
        (files / "new").write_bytes(b"another")
        before = descriptors.count_below(tmp_path)
        old = (await tree.lookup(top, b"name")).node
        await lose(tree, top)
        assert await read(tree, old) == b"old"
        wanted = Change(mode=0o640, size_bytes=2, modify_ns=5)
        changed = (await tree.setattr(old, wanted, None)).status
        assert (changed.st_size, changed.st_mtime_ns) == (2, 5)
        status = (await tree.getattr(old)).status
        assert (stat.S_IMODE(status.st_mode), status.st_size, status.st_nlink) == (0o640, 2, 0)
        written = await tree.open(old, os.O_RDWR | os.O_TRUNC, clears_ids=False)
        await tree.files.write(written.handle, 0, b"written", clears_ids=False)
        assert (await tree.getattr(old)).status.st_size == 7
        await tree.files.release(written.handle)
        assert await read(tree, old) == b"written"
        assert await errno_of(tree.link(old, top, b"again")) == errno.ENOENT
        assert descriptors.count_below(tmp_path) == before + 1
        tree.forget(old, 1)
        assert descriptors.count_below(tmp_path) == before
        assert await errno_of(tree.getattr(old)) == errno.ESTALE

    run(tmp_path, scenario)


@pytest.mark.parametrize("lose", LOSSES)
def test_requests_that_wait_for_the_removal_find_the_file(
    tmp_path: Path, lose: Callable[[IncomingTree, int], Awaitable[None]]
) -> None:
    async def scenario(tree: IncomingTree, top: int, files: Path) -> None:
        found: list[bytes | int] = []

        async def look(number: int) -> None:
            found.append(await read(tree, number))
            found.append((await tree.getattr(number)).status.st_size)

        for _ in range(50):
            (files / "name").write_bytes(b"old")
            (files / "new").write_bytes(b"another")
            old = (await tree.lookup(top, b"name")).node
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lose, tree, top)
                nursery.start_soon(look, old)
            tree.forget(old, 1)
        assert found == [b"old", 3] * 50

    run(tmp_path, scenario)


@pytest.mark.parametrize("lose", LOSSES)
def test_a_symbolic_link_that_lost_its_name(
    tmp_path: Path, lose: Callable[[IncomingTree, int], Awaitable[None]]
) -> None:
    async def scenario(tree: IncomingTree, top: int, files: Path) -> None:
        (files / "name").symlink_to("old")
        (files / "new").write_bytes(b"")
        old = (await tree.lookup(top, b"name")).node
        assert await tree.readlink(old) == b"old"
        await lose(tree, top)
        assert await tree.readlink(old) == b"old"
        changed = await tree.setattr(old, Change(modify_ns=5), None)
        assert stat.S_ISLNK(changed.status.st_mode)
        assert changed.status.st_mtime_ns == 5

    run(tmp_path, scenario)


def test_files_without_names_have_a_limited_number_of_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inode_table, "UNLINKED_MAX", 3)

    async def scenario(tree: IncomingTree, top: int, files: Path) -> None:
        before = descriptors.count_below(tmp_path)
        numbers = []
        for index in range(5):
            (files / "name").write_bytes(b"%d" % index)
            numbers.append((await tree.lookup(top, b"name")).node)
            await tree.unlink(top, b"name")
        assert descriptors.count_below(tmp_path) == before + 3
        for number in numbers[:2]:
            assert await errno_of(read(tree, number)) == errno.ESTALE
            assert (await tree.getattr(number)).status.st_size == 1  # as when it was removed
        assert [await read(tree, number) for number in numbers[2:]] == [b"2", b"3", b"4"]
        tree.forget(numbers[3], 1)
        assert descriptors.count_below(tmp_path) == before + 2
        tree.close()
        assert descriptors.count_below(tmp_path) < before + 2

    run(tmp_path, scenario)


def test_the_handles_of_a_file_keep_it_when_it_has_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inode_table, "UNLINKED_MAX", 0)

    async def scenario(tree: IncomingTree, top: int, files: Path) -> None:
        (files / "name").write_bytes(b"old")
        old = (await tree.lookup(top, b"name")).node
        handle = (await tree.open(old, os.O_RDONLY, clears_ids=False)).handle
        await tree.unlink(top, b"name")
        assert await read(tree, old) == b"old"
        changed = await tree.setattr(old, Change(mode=0o640, size_bytes=1), handle)
        assert (stat.S_IMODE(changed.status.st_mode), changed.status.st_size) == (0o640, 1)
        await tree.files.release(handle)
        assert await errno_of(read(tree, old)) == errno.ESTALE

    run(tmp_path, scenario)


def test_a_file_that_the_kernel_does_not_know_has_no_descriptor(tmp_path: Path) -> None:
    async def scenario(tree: IncomingTree, top: int, files: Path) -> None:
        before = descriptors.count_below(tmp_path)
        (files / "name").write_bytes(b"")
        await tree.unlink(top, b"name")
        (files / "name").write_bytes(b"")
        tree.forget((await tree.lookup(top, b"name")).node, 1)
        await tree.unlink(top, b"name")
        assert descriptors.count_below(tmp_path) == before

    run(tmp_path, scenario)


def test_a_file_with_other_names(tmp_path: Path) -> None:
    """A name that the kernel does not know keeps a file in its dataset."""

    async def scenario(tree: IncomingTree, top: int, files: Path) -> None:
        (files / "name").write_bytes(b"old")
        (files / "other").hardlink_to(files / "name")
        before = descriptors.count_below(tmp_path)
        old = (await tree.lookup(top, b"name")).node
        await tree.unlink(top, b"name")
        assert await read(tree, old) == b"old"
        # The dataset may be sealed with the other name, so nothing may be written.
        assert await errno_of(tree.open(old, os.O_WRONLY, clears_ids=False)) == errno.ESTALE
        assert await errno_of(tree.setattr(old, Change(mode=0), None)) == errno.ESTALE
        handle = (await tree.open(old, os.O_RDONLY, clears_ids=False)).handle
        await tree.setattr(old, Change(mode=0o640), None)
        await tree.files.release(handle)
        handle = (await tree.open(old, os.O_RDONLY, clears_ids=False)).handle
        assert await errno_of(tree.setattr(old, Change(size_bytes=0), None)) == errno.ESTALE
        await tree.files.release(handle)
        assert (await tree.lookup(top, b"other")).node == old
        await tree.setattr(old, Change(mode=0o640), None)
        await tree.unlink(top, b"other")
        await tree.setattr(old, Change(mode=0o600), None)
        assert await read(tree, old) == b"old"
        assert descriptors.count_below(tmp_path) == before + 1
        tree.forget(old, 2)
        assert descriptors.count_below(tmp_path) == before

    run(tmp_path, scenario)


def test_a_directory_is_not_moved_from_a_name_that_is_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hard link that is made while names are counted would lie in another dataset."""
    counted, linked = threading.Event(), threading.Event()
    walk_files = entries.walk_files

    def walk(directory: int) -> Iterator[tuple[bytes, os.stat_result]]:
        yield from walk_files(directory)
        counted.set()
        linked.wait(0.2)  # the link must not be made before the rename

    async def scenario(tree: IncomingTree, top: int, files: Path) -> None:
        other = (await tree.mkdir(ROOT, b"y", 0o755, OWNER)).node
        (files / "d").mkdir()
        (files / "d" / "name").write_bytes(b"old")
        folder = (await tree.lookup(top, b"d")).node
        name = (await tree.lookup(folder, b"name")).node
        outcomes: list[int] = []

        async def link() -> None:
            await trio.to_thread.run_sync(counted.wait)
            outcomes.append(await errno_of(tree.link(name, top, b"twin")))
            linked.set()

        monkeypatch.setattr(entries, "walk_files", walk)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link)
            await tree.rename(top, b"d", other, b"d", 0)
        assert outcomes == [errno.EXDEV]
        assert (await tree.getattr(name)).status.st_nlink == 1

    run(tmp_path, scenario)


def test_a_seal_waits_for_changes_in_a_directory_that_was_moved_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    create = entries.create

    def create_slowly(*args: Any, **kwargs: Any) -> tuple[int, os.stat_result]:
        begun.set()
        assert goes_on.wait(30)
        return create(*args, **kwargs)

    async def scenario(tree: IncomingTree, top: int, files: Path) -> None:
        other = (await tree.mkdir(ROOT, b"y", 0o755, OWNER)).node
        (files / "d").mkdir()
        folder = (await tree.lookup(top, b"d")).node
        outcomes: list[int] = []

        async def make() -> None:
            await tree.create(folder, b"new", 0o644, os.O_WRONLY, OWNER, clears_ids=False)

        async def seal() -> None:
            outcomes.append(await errno_of(tree.setxattr(other, b"user.dlfs.seal", b"1")))

        monkeypatch.setattr(entries, "create", create_slowly)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(make)
            await trio.to_thread.run_sync(begun.wait)
            await tree.rename(top, b"d", other, b"d", 0)
            nursery.start_soon(seal)
            await trio.testing.wait_all_tasks_blocked()
            goes_on.set()
        assert outcomes == [errno.EBUSY]
        error = SealStatus.decode(await tree.getxattr(other, b"user.dlfs.seal")).error
        assert error == "seal 'y': 'y/d/new' is open for writing"

    run(tmp_path, scenario)


@pytest.mark.parametrize("known", [False, True])
def test_a_seal_finds_writers_by_all_their_names(tmp_path: Path, known: bool) -> None:
    """It goes by device and inode number, whatever names the kernel knows."""

    async def scenario(tree: IncomingTree, top: int, files: Path) -> None:
        other = (await tree.mkdir(ROOT, b"y", 0o755, OWNER)).node
        (files / "d").mkdir()
        (files / "d" / "name").write_bytes(b"old")
        (files.parents[1] / "y" / "files" / "other").hardlink_to(files / "d" / "name")
        if known:
            await tree.lookup((await tree.lookup(top, b"d")).node, b"name")
        written = (await tree.lookup(other, b"other")).node
        handle = (await tree.open(written, os.O_WRONLY, clears_ids=False)).handle
        assert await errno_of(tree.setxattr(top, b"user.dlfs.seal", b"1")) == errno.EBUSY
        error = SealStatus.decode(await tree.getxattr(top, b"user.dlfs.seal")).error
        assert error == "seal 'x': 'x/d/name' is open for writing"
        await tree.files.release(handle)
        await tree.setxattr(top, b"user.dlfs.seal", b"1")

    run(tmp_path, scenario)


def test_a_dataset_whose_names_cannot_be_read_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    async def scenario(tree: IncomingTree, top: int, files: Path) -> None:
        (files / "name").write_bytes(b"old")
        (files / "other").hardlink_to(files / "name")
        old = (await tree.lookup(top, b"name")).node
        handle = (await tree.open(old, os.O_WRONLY, clears_ids=False)).handle
        await tree.unlink(top, b"name")
        with monkeypatch.context() as patch:
            patch.setattr(entries, "find_files", fail)
            assert await errno_of(tree.setxattr(top, b"user.dlfs.seal", b"1")) == errno.EIO
        status = SealStatus.decode(await tree.getxattr(top, b"user.dlfs.seal"))
        assert (status.state, status.error) == ("open", "seal 'x': [Errno 5] broken")
        await tree.files.release(handle)
        await tree.setxattr(top, b"user.dlfs.seal", b"1")

    run(tmp_path, scenario)


def test_a_file_without_a_name_is_written_while_its_dataset_is_sealed(tmp_path: Path) -> None:
    async def scenario(tree: IncomingTree, top: int, files: Path) -> None:
        (files / "name").write_bytes(b"old")
        (files / "kept").write_bytes(b"")
        old = (await tree.lookup(top, b"name")).node
        kept = (await tree.lookup(top, b"kept")).node
        await tree.unlink(top, b"name")
        written = await tree.open(old, os.O_WRONLY, clears_ids=False)
        await tree.setxattr(top, b"user.dlfs.seal", b"1")
        assert await errno_of(tree.open(kept, os.O_WRONLY, clears_ids=False)) == errno.EBUSY
        await tree.files.write(written.handle, 0, b"new", clears_ids=False)
        await tree.files.release(written.handle)
        await tree.setattr(old, Change(size_bytes=2), None)
        assert await read(tree, old) == b"ne"

    run(tmp_path, scenario)
