"""Folders as sources: what is taken, in which order, and what is refused beforehand."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlfs.errors import DeviceError, LimitError, NotFoundError, UsageError
from dlfs.ingest import files as files_module
from dlfs.ingest.bad_records import BadRecords, SkipBad, opening
from dlfs.ingest.formats.folder import FolderSource
from dlfs.ingest.source import BUFFER_BYTES
from tests.support.files import write_files
from tests.unit.ingest.taking import take as take_all


def take(
    root: Path,
    *,
    layout: Any = "path",
    seed: int = 0,
    buffer_bytes: int = BUFFER_BYTES,
    **options: Any,
) -> list[Any]:
    source = FolderSource(root, **options)
    source.buffer_bytes = buffer_bytes
    got = take_all(source, layout=layout, seed=seed)
    return [(os.fsencode(path), data) for path, (data, _) in got.items()]


FILES = {
    b"a.txt": b"dot sorts before slash",
    b"a/1": b"one",
    b"a/2": b"",
    b"a-b": b"minus sorts before slash",
    b"a0": b"zero sorts after it",
    b".hidden": b"kept",
    b"new\nline and space": b"n",
    b"\xff\xfe": b"not UTF-8",
    b"deep/er/still": b"d" * 10000,
}


def test_takes_every_file_in_path_order(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    source = FolderSource(tmp_path)
    assert source.sample_count == len(FILES)
    assert source.sample_bytes == sum(map(len, FILES.values()))
    assert source.skipped == {}
    assert list(source.empty_directories) == []
    assert take(tmp_path) == sorted(FILES.items())


@pytest.mark.parametrize("part", [1, 7, 63, 64])
def test_files_are_looked_at_while_others_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(files_module, "STAT_FILES", part)
    files = {b"%d/%03d" % (i % 3, i): b"%d" % i * i for i in range(64)}
    write_files(tmp_path, files)
    assert take(tmp_path) == sorted(files.items())
    stat_files, first = files_module.stat_files, tmp_path / "0/000"

    def remove_and_stat(*arguments: Any, **options: Any) -> int:
        first.unlink(missing_ok=True)
        return stat_files(*arguments, **options)

    monkeypatch.setattr(files_module, "stat_files", remove_and_stat)
    with pytest.raises(DeviceError, match="0/000: No such file"):
        FolderSource(tmp_path)


@pytest.mark.parametrize("part", [1, 2, 100])
def test_entries_of_each_kind_are_in_path_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(files_module, "STAT_FILES", part)
    names = [
        b"a",
        b"a-",
        b"a.",
        b"a/b",
        b"a/b0",
        b"a/c/1",
        b"a/c0",
        b"a0",
        b"b/1",
        b"c",
        b"d",
        b"e",
    ]
    files = {b"%d/%s" % (i, name): name for i in range(2) for name in names if name != b"a"}
    write_files(tmp_path, files)
    for i in range(2):
        for link, target in ((b"Z", b"d"), (b"a-link", b"b"), (b"cc", b"c"), (b"z", b"a/c")):
            os.symlink(target, os.fsencode(tmp_path) + b"/%d/%s" % (i, link))
        files |= {b"%d/Z" % i: b"d", b"%d/a-link/1" % i: b"b/1", b"%d/cc" % i: b"c"}
        files[b"%d/z/1" % i] = b"a/c/1"
    assert take(tmp_path) == sorted(files.items())


def test_shuffled_is_another_order_of_the_same_by_the_seed(tmp_path: Path) -> None:
    files = {b"%03d" % i: b"%d" % i for i in range(200)}
    write_files(tmp_path, files)
    one, two = (take(tmp_path, layout="shuffled", seed=seed) for seed in (1, 2))
    assert one != two
    assert sorted(one) == sorted(two) == sorted(files.items())
    assert one == take(tmp_path, layout="shuffled", seed=1)


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("buffer_bytes", [1, 100, 1 << 20])
def test_buffers_of_any_size_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int, threads: int
) -> None:
    monkeypatch.setattr(files_module, "THREADS", threads)
    files = {b"%03d" % i: b"%d" % i * i for i in range(64)}
    write_files(tmp_path, files)
    got = take(tmp_path, layout="shuffled", seed=3, buffer_bytes=buffer_bytes)
    assert sorted(got) == sorted(files.items())


def test_an_empty_folder_has_no_samples(tmp_path: Path) -> None:
    assert take(tmp_path, layout="shuffled") == []


def test_lists_directories_without_samples(tmp_path: Path) -> None:
    write_files(tmp_path, {b"kept/below/file": b"x"})
    (tmp_path / "empty" / "nested").mkdir(parents=True)
    (tmp_path / "kept" / "empty").mkdir()
    found = FolderSource(tmp_path).empty_directories
    assert sorted(found) == [b"empty", b"empty/nested", b"kept/empty"]


def test_skips_and_counts_special_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.close()
    write_files(tmp_path, {b"file": b"x"})
    source = FolderSource(tmp_path)
    assert source.skipped == {"special file": 2}
    assert take(tmp_path) == [(b"file", b"x")]


def test_follows_links_to_files_and_folders(tmp_path: Path) -> None:
    write_files(tmp_path / "outside", {b"x/y": b"1"})
    write_files(tmp_path / "in", {b"z": b"2"})
    (tmp_path / "in" / "folder").symlink_to("../outside")
    (tmp_path / "in" / "file").symlink_to(tmp_path / "outside" / "x" / "y")
    assert take(tmp_path / "in") == [(b"file", b"1"), (b"folder/x/y", b"1"), (b"z", b"2")]


def test_skips_links_and_counts_them(tmp_path: Path) -> None:
    write_files(tmp_path, {b"a/z": b"2"})
    (tmp_path / "folder").symlink_to("a")
    (tmp_path / "dangling").symlink_to("nowhere")
    source = FolderSource(tmp_path, links="skip")
    assert source.skipped == {"symbolic link": 2}
    assert take(tmp_path, links="skip") == [(b"a/z", b"2")]


def test_refuses_links_by_name(tmp_path: Path) -> None:
    write_files(tmp_path, {b"a/z": b"2"})
    (tmp_path / "a" / "link").symlink_to("z")
    with pytest.raises(UsageError, match="a/link: expected no symbolic links"):
        FolderSource(tmp_path, links="error")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere", "leads to nothing"),
        ("link", "leads back to itself"),
        ("file/x", "leads to nothing"),
    ],
)
def test_a_broken_link_is_an_error_that_names_it(tmp_path: Path, target: str, message: str) -> None:
    write_files(tmp_path, {b"file": b""})
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(UsageError, match=f"link: the symbolic link {message}"):
        FolderSource(tmp_path)


@pytest.mark.parametrize("target", [".", "..", "../.."])
def test_a_link_to_a_folder_above_it_is_an_error(tmp_path: Path, target: str) -> None:
    (tmp_path / "top" / "a" / "b").mkdir(parents=True)
    (tmp_path / "top" / "a" / "b" / "up").symlink_to(target)
    with pytest.raises(UsageError, match="b/up: the link leads to a folder above it"):
        FolderSource(tmp_path / "top")


def test_a_root_that_is_a_link_is_followed(tmp_path: Path) -> None:
    write_files(tmp_path / "real", {b"a": b"1"})
    (tmp_path / "root").symlink_to("real")
    assert take(tmp_path / "root", links="error") == [(b"a", b"1")]


def test_a_missing_folder_and_a_file_are_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {b"a": b"1"})
    with pytest.raises(NotFoundError, match="no such folder"):
        FolderSource(tmp_path / "b")
    with pytest.raises(UsageError, match="expected a folder"):
        FolderSource(tmp_path / "a")


@pytest.mark.parametrize("change", ["grow", "shrink", "touch", "remove", "replace"])
def test_a_file_that_changes_is_an_error_that_names_it(tmp_path: Path, change: str) -> None:
    write_files(tmp_path, {b"a": b"1", b"changing": b"22"})
    source, path = FolderSource(tmp_path), tmp_path / "changing"
    if change in ("remove", "replace"):
        path.unlink()
    if change == "replace":
        path.symlink_to("changing")
    elif change == "touch":
        os.utime(path, ns=(5, 5))
    elif change != "remove":
        path.write_bytes(b"333" if change == "grow" else b"4")
    with pytest.raises(DeviceError, match="changing: the file changed") as caught:
        list(source.blocks(layout="path", seed=0))
    assert caught.value.errno == errno.ESTALE


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Root may read everything, so root becomes another user for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


def test_a_file_that_may_not_be_read_is_an_error(unprivileged: None) -> None:
    with TemporaryDirectory() as root:
        write_files(Path(root), {b"secret": b"1", b"public": b"2"})
        (Path(root) / "secret").chmod(0)
        with pytest.raises(DeviceError, match="secret: the file may not be read") as caught:
            FolderSource(root)
        assert caught.value.errno == errno.EACCES


def test_a_path_over_the_limit_is_an_error(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for _ in range(17):
        os.mkdir("n" * 250, dir_fd=descriptor)
        below = os.open("n" * 250, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    with pytest.raises(LimitError, match="4095"):
        FolderSource(tmp_path)


def test_the_longest_path_is_taken(tmp_path: Path) -> None:
    descriptor, parts = os.open(tmp_path, os.O_RDONLY), []
    for _ in range(16):
        parts.append(b"n" * 254)
        os.mkdir(parts[-1], dir_fd=descriptor)
        below = os.open(parts[-1], os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    parts.append(b"f" * 15)
    os.close(os.open(parts[-1], os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
    os.close(descriptor)
    path = b"/".join(parts)
    assert len(path) == 4095
    assert take(tmp_path) == [(path, b"")]


def test_of_files_of_one_folder_only_those_with_too_long_paths_are_bad(tmp_path: Path) -> None:
    folder, descriptor = b"/".join([b"n" * 254] * 16), os.open(tmp_path, os.O_RDONLY)
    for part in folder.split(b"/"):
        os.mkdir(part, dir_fd=descriptor)
        below = os.open(part, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    for name in (b"a", b"b" * 16, b"c"):
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
    os.close(descriptor)
    with opening(BadRecords(SkipBad(count=1))):
        source = FolderSource(tmp_path)
    found = [*take_all(source, layout="path", seed=0)]
    assert [os.fsencode(path) for path in found] == [folder + b"/a", folder + b"/c"]
    [bad] = source.bad.report().records
    assert os.fsencode(bad.record) == folder + b"/" + b"b" * 16


def test_closing_early_ends_the_reading(tmp_path: Path) -> None:
    def threads_and_descriptors() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    write_files(tmp_path, {b"%d" % i: b"x" * 50 for i in range(50)})
    before = threads_and_descriptors()
    source = FolderSource(tmp_path)
    source.buffer_bytes = 100
    blocks = source.blocks(layout="path", seed=0)
    assert len(next(blocks).paths) == 2
    assert threads_and_descriptors() > before  # a thread reads ahead
    blocks.close()
    assert next(blocks, None) is None
    source.close()
    source.close()
    # Threads of earlier tests may end meanwhile.
    assert all(now <= then for now, then in zip(threads_and_descriptors(), before, strict=True))


NAMES = st.binary(min_size=1, max_size=12).filter(
    lambda name: not set(name) & {0, 47} and name not in (b".", b"..")
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.dictionaries(
        st.lists(NAMES, min_size=1, max_size=3).map(b"/".join), st.binary(max_size=50), max_size=12
    ).filter(lambda d: not any(a != b and b.startswith(a + b"/") for a in d for b in d)),
    layout=st.sampled_from(["path", "shuffled"]),
)
def test_any_names_come_back(
    tmp_path_factory: pytest.TempPathFactory, files: dict[bytes, bytes], layout: str
) -> None:
    root = tmp_path_factory.mktemp("any")
    write_files(root, files)
    got = take(root, layout=layout, buffer_bytes=64)
    assert sorted(got) == sorted(files.items())
    if layout == "path":
        assert got == sorted(files.items())
