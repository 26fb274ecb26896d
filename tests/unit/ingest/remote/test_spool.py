"""The spool directory: every format through it, what interruptions leave, what is refused."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlfs.base.extras import install_command
from dlfs.errors import (
    ChecksumError,
    DeviceError,
    DlfsError,
    FormatError,
    LockedError,
    NotFoundError,
    SpaceError,
    TruncatedError,
    UsageError,
)
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.ingest.progress import Progress
from dlfs.ingest.remote import failures, spool, stores
from dlfs.ingest.remote.spool import default_directory
from dlfs.ingest.remote.stores import REQUESTS, Store, open_store
from dlfs.volume.volume import Volume
from tests.support.files import write_files
from tests.unit.ingest.array_writers import write_hdf5, write_npz, write_zarr
from tests.unit.ingest.taking import contents, import_by_command, take

fsspec = pytest.importorskip("fsspec")
FILES = {f"c{i % 3}/{i}.bin": random.Random(i).randbytes(i * 100) for i in range(30)}
ARRAYS = {"x": np.arange(40, dtype="f4").reshape(10, 4), "y": np.arange(10)}


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "DELAY_S", 0.001)


@pytest.fixture
def memory() -> Iterator[Any]:
    """The file system of ``memory://``, with ``FILES`` in the folder ``data``."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    for name, data in FILES.items():
        system.pipe(f"/data/{name}", data)
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The names and first bytes of all pieces that are read from now on."""
    seen: list[tuple[str, int]] = []
    read = Store.read

    def noted(self: Store, item: Any, first: int, *rest: Any) -> Any:
        seen.append((item.name, first))
        return read(self, item, first, *rest)

    monkeypatch.setattr(Store, "read", noted)
    return seen


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, first: int = 0) -> None:
    """Make every read of a piece of an object raise an error."""
    read = Store.read

    def failing(self: Store, item: Any, start: int, *rest: Any) -> Any:
        if (item.name, start) == (name, first):
            raise error
        return read(self, item, start, *rest)

    monkeypatch.setattr(Store, "read", failing)


# ---- formats -------------------------------------------------------------------------------------


def write_folder(path: Path) -> str:
    write_files(path / "data", FILES)
    return "data"


def write_tar(path: Path, name: str = "data.tar") -> str:
    write_folder(path)
    with tarfile.open(path / name, "w:gz" if name.endswith("gz") else "w") as archive:
        archive.add(path / "data", ".")
    shutil.rmtree(path / "data")
    return name


def write_parquet(path: Path) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"x": [b"a", b"bc"], "y": [1, 2]}), path / "x.parquet")
    return "x.parquet"


def write_arrays(path: Path, name: str, write: Callable[..., None]) -> str:
    write(path / name, ARRAYS)
    return name


WRITERS: dict[str, Callable[[Path], str]] = {
    "folder": write_folder,
    "tar": write_tar,
    "tar.gz": lambda path: write_tar(path, "data.tar.gz"),
    "parquet": write_parquet,
    "npz": lambda path: write_arrays(path, "a.npz", write_npz),
    "hdf5": lambda path: write_arrays(path, "a.h5", write_hdf5),
    "zarr": lambda path: write_arrays(path, "a.zarr", write_zarr),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_format_gives_the_same_from_a_url(name: str, tmp_path: Path) -> None:
    source = WRITERS[name](tmp_path)
    options = {"attributes": ("label=y",), "select": ("x",)} if name in ("hdf5", "npz") else {}
    local = take(open_source(tmp_path / source, options=options))
    url = f"file://{tmp_path / source}"
    assert take(open_source(url, options=options, spool=tmp_path / "spool")) == local
    assert local


def test_the_command_line_takes_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_directory() == str(tmp_path / "cache" / "dlfs" / "spool")
    url = f"file://{tmp_path / write_folder(tmp_path)}"
    assert import_by_command(tmp_path, f"{url} V") == FILES
    assert os.listdir(default_directory()) == []


def test_patterns_and_local_paths_keep_their_order(memory: Any, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        np.save(tmp_path / f"{name}.npy", np.full(1, len(name), "u1"))
    for name in ("two", "three"):
        memory.put_file(str(tmp_path / f"{name}.npy"), f"/arrays/{name}.npy")
    paths = ["memory://arrays/t*.npy", str(tmp_path / "one.npy"), "memory://data/{no,}"]
    seen: list[Progress] = []
    source = open_source(paths[:2], spool=tmp_path / "spool", fetch_progress=seen.append)
    sizes = [(tmp_path / f"{name}.npy").stat().st_size for name in ("two", "three")]
    assert (seen[-1].samples_done, seen[-1].bytes_done) == (2, sum(sizes))
    assert source.name == f"memory:///arrays/three.npy .. {paths[1]}"
    assert {path.partition("/")[0] for path in take(source)} == {"three", "two", "one"}
    with pytest.raises(NotFoundError, match="import memory://data/no: there is no such object"):
        open_source(paths, spool=tmp_path / "spool")
    with pytest.raises(NotFoundError, match="nothing matches"):
        open_source("memory://arrays/z*", spool=tmp_path / "spool")


def test_damage_in_an_object_is_named_by_its_url(memory: Any, tmp_path: Path) -> None:
    data = (tmp_path / write_tar(tmp_path)).read_bytes()
    memory.pipe("/cut.tar", data[: len(data) // 2])
    with pytest.raises(TruncatedError, match=r"import memory://cut\.tar: at byte"):
        open_source("memory://cut.tar", spool=tmp_path / "spool")


# ---- an interruption -----------------------------------------------------------------------------


def test_copies_are_deleted_when_the_dataset_is_sealed(
    memory: Any, tmp_path: Path, volume: Volume
) -> None:
    source = open_source("memory://data", spool=tmp_path)
    assert source.name == "memory://data"
    import_dataset(volume, source, "n")
    source.close()
    assert contents(volume, "n") == FILES
    assert list(tmp_path.iterdir()) == []


def test_a_failed_import_goes_on_with_what_it_has(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[tuple[str, int]]
) -> None:
    monkeypatch.setattr(stores, "PIECE_BYTES", 1000)
    with monkeypatch.context() as context:
        fail_at(context, "c2/29.bin", PermissionError("no"), first=2000)
        with pytest.raises(DeviceError, match=r"import memory://data/c2/29.bin: read") as caught:
            take(open_source("memory://data", spool=tmp_path))
    assert caught.value.errno == errno.EACCES
    assert "goes on with" in caught.value.__notes__[0]
    first = set(reads)
    reads.clear()
    (manifest,) = tmp_path.glob("*/manifest.jsonl")
    with manifest.open("ab") as file:
        file.write(b'{"object": "cut o')
    (block,) = tmp_path.glob("*/blocks/*/0")
    block.write_bytes(block.read_bytes().replace(FILES["c1/28.bin"], bytes(2800)))
    assert {
        path: data for path, (data, _) in take(open_source("memory://data", spool=tmp_path)).items()
    } == FILES
    assert ("c2/29.bin", 2000) in reads
    assert first & set(reads) == {("c1/28.bin", at) for at in (0, 1000, 2000)}


def test_an_import_of_other_objects_uses_no_copy_of_before(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        fail_at(context, "c2/29.bin", PermissionError("no"))
        with pytest.raises(DeviceError):
            take(open_source("memory://data", spool=tmp_path))
    memory.rm("/data/c0/0.bin")  # an object that is gone, or new, is not what was listed before
    memory.pipe("/data/c0/3.bin", b"new")
    expected = {**FILES, "c0/3.bin": b"new"}
    del expected["c0/0.bin"]
    source = open_source("memory://data", spool=tmp_path)
    assert {path: data for path, (data, _) in take(source).items()} == expected


def test_an_object_that_is_recorded_but_not_yet_named_is_not_read_again(
    memory: Any, tmp_path: Path, reads: list[tuple[str, int]]
) -> None:
    url = "memory://" + write_tar(tmp_path)
    memory.put_file(str(tmp_path / "data.tar"), "/data.tar")
    open_source(url, spool=tmp_path / "spool").close()
    (manifest,) = (tmp_path / "spool").glob("*/manifest.jsonl")
    (copy,) = manifest.parent.glob("files/0/data.tar")
    (line,) = manifest.read_text().splitlines()
    copy.rename(manifest.parent / "parts" / line.partition('"object": "')[2][:32])
    reads.clear()
    assert len(take(open_source(url, spool=tmp_path / "spool"))) == len(FILES)
    assert reads == []


def test_two_imports_of_one_source_exclude_each_other(memory: Any, tmp_path: Path) -> None:
    source = open_source("memory://data", spool=tmp_path)
    with pytest.raises(LockedError, match="another import of the same source runs"):
        open_source("memory://data", spool=tmp_path)
    source.close()
    open_source("memory://data", spool=tmp_path).close()


def test_as_many_requests_as_allowed_are_in_flight(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single large object is read by all threads, each with one piece."""
    monkeypatch.setattr(stores, "PIECE_BYTES", 1000)
    data = random.Random(1).randbytes(REQUESTS * 3000)
    memory.pipe("/large/large.bin", data)
    read, together = Store.read, threading.Barrier(REQUESTS, timeout=60)

    def waiting(self: Store, item: Any, first: int, last: int, sink: Any) -> Any:
        together.wait()  # breaks if fewer requests than that are ever in flight
        assert last - first == 1000
        return read(self, item, first, last, sink)

    monkeypatch.setattr(Store, "read", waiting)
    source = open_source("memory://large", format_name="folder", spool=tmp_path)
    monkeypatch.undo()
    assert take(source)["large.bin"] == (data, {})


# ---- faults --------------------------------------------------------------------------------------


def test_an_object_that_changes_while_it_is_read_is_an_error(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Store.read

    def changing(self: Store, item: Any, *rest: Any) -> Any:
        if item.name == "c1/4.bin":
            memory.pipe("/data/c1/4.bin", b"x" * item.size_bytes)
        return read(self, item, *rest)

    monkeypatch.setattr(Store, "read", changing)
    with pytest.raises(DeviceError, match=r"data/c1/4.bin: the object changed") as caught:
        take(open_source("memory://data", spool=tmp_path))
    assert caught.value.errno == errno.ESTALE


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError("x"), "the object was removed during the import"),
        (TimeoutError("slow"), "slow"),
        (ConnectionResetError("reset"), "reset"),
        (RuntimeError("surprise"), "surprise"),
    ],
)
def test_an_error_that_does_not_go_away_names_the_object(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: str
) -> None:
    fail_at(monkeypatch, "c2/8.bin", error)
    with pytest.raises(DlfsError, match=rf"import memory://data/c2/8.bin: .*{expected}"):
        take(open_source("memory://data", spool=tmp_path))


def test_a_body_that_is_too_short_or_too_long_is_an_error(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for body in (b"", b"x" * 10000):
        with monkeypatch.context() as context:
            context.setattr(Store, "read", lambda *all, body=body: all[-1](body) or {})
            with pytest.raises(TruncatedError, match=r"expected .* bytes, got"):
                open_source("memory://data/c2/8.bin", spool=tmp_path)


def test_a_digest_that_differs_is_an_error(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "find_digests", lambda info: {"sha256": "00"})
    with pytest.raises(ChecksumError, match=r"import memory://data/c2/8.bin: expected sha256 00 "):
        open_source("memory://data/c2/8.bin", format_name="list", spool=tmp_path)


def test_too_little_space_is_an_error_before_any_read(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[tuple[str, int]]
) -> None:
    monkeypatch.setattr(spool, "RESERVE_BYTES", 1 << 60)
    with pytest.raises(SpaceError, match="spool=DIRECTORY names another"):
        take(open_source("memory://data", spool=tmp_path))
    assert reads == []


def test_a_disk_that_is_full_is_an_error_that_no_request_repeats(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[tuple[str, int]]
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SpaceError, match=r"write a local copy in .*: no space is left"):
        open_source("memory://data/c2/8.bin", spool=tmp_path)
    assert len(reads) == 1


def test_what_has_no_objects_or_no_size_is_refused(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.mkdir("/empty")
    with pytest.raises(NotFoundError, match="there is no object in the folder"):
        open_source("memory://empty", spool=tmp_path)
    info = {"type": "file", "size": None}
    monkeypatch.setattr(type(memory), "info", lambda self, path, **options: info)
    with pytest.raises(UsageError, match="expected a size from the store"):
        open_source("memory://data/c2/8.bin", spool=tmp_path)


def test_objects_that_cannot_be_files_are_refused(memory: Any, tmp_path: Path) -> None:
    memory.store["/data/c0/../x"] = memory.store["/data/c0/3.bin"]
    with pytest.raises(FormatError, match=r"import memory://data/c0/../x: .*without '..'"):
        open_source("memory://data", spool=tmp_path)
    del memory.store["/data/c0/../x"]
    memory.store["/data/c0"] = memory.store["/data/c0/3.bin"]
    with pytest.raises(FormatError, match="data/c0: expected a folder or an object"):
        open_source("memory://data", spool=tmp_path)
    del memory.store["/data/c0"]
    memory.store["/data/c0//3.bin"] = memory.store["/data/c0/3.bin"]
    with pytest.raises(FormatError, match="expected objects of different paths"):
        open_source("memory://data", spool=tmp_path)
    del memory.store["/data/c0//3.bin"]


def test_unknown_urls_and_missing_packages_are_usage_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="s3x"):
        open_source("s3x://bucket/key", spool=tmp_path)
    with pytest.raises(UsageError, match="expected one URL"):
        open_source("tar://x::s3://bucket/key", spool=tmp_path)
    assert list(tmp_path.iterdir()) == []  # nothing to go on with

    def missing(url: str, **options: Any) -> None:
        raise ImportError("Please install it")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    for url, command in (
        ("s3://b/k", re.escape(install_command("s3"))),
        ("gs://b/k", "pip install gcsfs"),
    ):
        with pytest.raises(UsageError, match=command):
            open_source(url, spool=tmp_path)


def test_a_list_of_remote_files_is_refused(memory: Any, tmp_path: Path) -> None:
    memory.pipe("/data/list.txt", b"c0/3.bin")
    with pytest.raises(UsageError, match=r"import memory://data/list\.txt: expected a local list"):
        open_source("memory://data/list.txt", spool=tmp_path)


def test_a_spool_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DeviceError, match=r"make the directory .*file"):
        open_source("memory://data", spool=tmp_path / "file")


# ---- other users ---------------------------------------------------------------------------------


def folder_of(directory: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of ``memory://data``, after an import of it that failed."""
    with monkeypatch.context() as patch:
        fail_at(patch, "c1/7.bin", ValueError("on purpose"))
        with pytest.raises(DlfsError):
            take(open_source("memory://data", spool=directory))
    (folder,) = directory.iterdir()
    return folder


def test_the_spool_is_of_the_user_alone(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "spool", memory, monkeypatch)
    for path in (folder, folder / "parts", folder / "files"):
        assert path.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(UsageError, match="expected a directory of mode 0700"):
        open_source("memory://data", spool=tmp_path / "spool")


def test_the_spool_follows_no_links(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "spool", memory, monkeypatch)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_bytes(b"untouched")
    manifest = folder / "manifest.jsonl"
    kept = manifest.read_bytes()
    manifest.unlink()
    manifest.symlink_to(victim / "file")
    with pytest.raises(DlfsError, match=r"symbolic link|Too many levels"):
        open_source("memory://data", spool=tmp_path / "spool")
    manifest.unlink()
    manifest.write_bytes(kept)
    shutil.rmtree(folder / "files")
    (folder / "files").symlink_to(victim)
    with pytest.raises(UsageError, match="got a link or a file"):
        open_source("memory://data", spool=tmp_path / "spool")
    (folder / "files").unlink()
    (folder / "files" / "0" / "data").mkdir(parents=True)
    (folder / "files" / "0" / "data" / "c0").symlink_to(victim)
    (folder / "files").chmod(0o700)
    with closing(open_source("memory://data", spool=tmp_path / "spool")) as source:
        assert {name: data for name, (data, _) in take(source).items()} == FILES
    assert {path.name: path.read_bytes() for path in victim.iterdir()} == {"file": b"untouched"}


@pytest.mark.root
def test_a_folder_of_another_user_is_not_taken_over(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "spool", memory, monkeypatch)
    os.chown(folder, 65534, 65534)
    with pytest.raises(UsageError, match="got one of user 65534"):
        open_source("memory://data", spool=tmp_path / "spool")


# ---- globs, of a file system that finds objects by listing each folder ---------------------------


@pytest.fixture
def walked(memory: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(stores, "_walks", lambda _system: True)
    return memory


@pytest.mark.parametrize(
    "pattern",
    ["data/*", "data/**/*2.bin", "d*a/[a-c]*", "*/c1", "data/*/", "**/*1*", "dat?/{c1,c2}/1*"],
)
def test_a_glob_matches_what_fsspec_does(walked: Any, pattern: str) -> None:
    expected = sorted(walked.glob(f"memory://{pattern}"))
    if not expected:
        with pytest.raises(NotFoundError, match="nothing matches"):
            open_store("memory://").match(f"memory://{pattern}")
        return
    found = open_store("memory://").match(f"memory://{pattern}")
    assert found == [walked.unstrip_protocol(path) for path in expected]


def test_a_glob_does_not_leave_out_a_folder_that_cannot_be_listed(
    walked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked.pipe("/data/closed/x.tar", b"x")
    listed = type(walked).ls

    def denied(self: Any, path: str, *rest: Any, **options: Any) -> Any:
        if path.strip("/") == "data/closed":
            raise PermissionError(errno.EACCES, "denied")
        return listed(self, path, *rest, **options)

    monkeypatch.setattr(type(walked), "ls", denied)
    with pytest.raises(DeviceError, match=r"import memory:///data/closed: .*denies access"):
        open_store("memory://").match("memory://data/*/*.tar")
    assert open_store("memory://").match("memory://dat*") == ["memory:///data"]
