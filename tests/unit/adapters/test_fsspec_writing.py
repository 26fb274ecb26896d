"""``dlfs://`` opened for writing: a file becomes a sample when it is closed, and not before."""

from __future__ import annotations

import contextlib
import errno
import gc
import gzip
import multiprocessing
import os
import pickle
import signal
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

import dlfs
from dlfs.adapters import new_files
from dlfs.adapters.fsspec import DlfsFileSystem
from dlfs.base.units import KIB, MIB


@pytest.fixture
def volume(tmp_path: Path) -> str:
    path = str(tmp_path / "volume.img")
    dlfs.format_volume(path, size_bytes=8 * MIB, chunk_bytes=16 * KIB)
    return path


@pytest.fixture
def fs(volume: str) -> DlfsFileSystem:
    return fsspec.filesystem("dlfs", volume=volume, skip_instance_cache=True, lock_timeout_s=10)


def stored(volume: str) -> dict[str, bytes]:
    """Return the samples of the newest versions."""
    with dlfs.open(volume) as opened:
        found = {}
        for name in {info.name for info in opened.datasets()}:
            with opened.dataset(name) as dataset:
                for path in dataset.paths():
                    found[f"{name}/{path.decode()}"] = dataset.get(path)
        return found


def test_a_file_is_visible_after_its_close_only(fs, volume):
    with fs.open("models/a/first.bin", "wb") as file:
        assert file.write(b"12345") == 5
        assert (file.tell(), file.writable(), file.seekable()) == (5, True, True)
        file.seek(1)
        file.write(b"x")
        assert file.read() == b"345"
        assert stored(volume) == {}
        assert not fs.exists("models/a/first.bin")
    assert stored(volume) == {"models/a/first.bin": b"1x345"}
    assert fs.cat_file("models/a/first.bin") == b"1x345"
    with pytest.raises(dlfs.ClosedError, match="closed"):
        file.write(b"")
    file.close()


def test_files_of_a_dataset_are_added_to_a_new_version(fs, volume):
    with dlfs.open(volume) as opened, opened.writer("models") as writer:
        writer.add("old", b"old" * 9000)
    with dlfs.open(volume) as opened:
        before = opened.free_bytes
    fs.makedirs("models/sub", exist_ok=True)
    fs.write_text("models/sub/new", "new")
    fs.pipe({"models/b": b"b", "models/empty": b""})
    fs.put_file(__file__, "models/code/test.py")
    assert stored(volume) == {
        "models/old": b"old" * 9000,
        "models/sub/new": b"new",
        "models/b": b"b",
        "models/empty": b"",
        "models/code/test.py": Path(__file__).read_bytes(),
    }
    with dlfs.open(volume) as opened:
        assert [info.version for info in opened.versions("models")] == [1, 2, 3, 4, 5]
        assert before - opened.free_bytes < 18 * 16 * KIB  # what was there is shared
        assert list(opened.verify()) == []


def test_the_only_file_of_a_dataset_is_replaced(volume):
    fs = fsspec.filesystem("dlfs", volume=volume, keep_versions=1, skip_instance_cache=True)
    for content in (b"one", b"two", b"three"):
        old = fs.open("last/state", "rb") if fs.exists("last/state") else None
        with fs.open("last/state", "wb") as file:
            file.write(content)
        assert fs.cat_file("last/state") == content
        assert old is None or old.read() != content
    with dlfs.open(volume) as opened:
        assert [info.version for info in opened.versions("last")] == [3]


@pytest.mark.parametrize(
    ("path", "mode", "code"),
    [
        ("models/a", "wb", errno.EEXIST),
        ("models/sub/b", "xb", errno.EEXIST),
        ("only/a", "xb", errno.EEXIST),
        ("models/sub", "wb", errno.EISDIR),
        ("models", "wb", errno.EISDIR),
        ("models/a", "ab", errno.EROFS),
        ("models/a", "r+b", errno.EROFS),
    ],
)
def test_what_cannot_be_written_is_refused_at_open(fs, volume, path, mode, code):
    fs.pipe({"models/a": b"a", "models/sub/b": b"b", "only/a": b"a"})
    before = stored(volume)
    with pytest.raises(OSError) as raised:
        fs.open(path, mode)
    assert raised.value.errno == code
    assert stored(volume) == before


def test_names_that_are_not_allowed_are_refused_at_open(fs):
    with pytest.raises(dlfs.UsageError, match="name a new dataset"):
        fs.open("models@2/a", "wb")
    with pytest.raises(dlfs.UsageError, match=r"\.\."):
        fs.open("models/../a", "wb")
    with pytest.raises(dlfs.UsageError, match="keep_versions"):
        fsspec.filesystem("dlfs", keep_versions=0, skip_instance_cache=True)


def fail_after(file, content):
    file.write(content)
    raise ZeroDivisionError


def test_a_writer_that_fails_leaves_nothing(fs, volume):
    url = f"dlfs://{volume}!/models/a"
    for opened in (fs.open("models/a", "wb"), fs.open("models/a", "w"), fsspec.open(url, "wb")):
        with pytest.raises(ZeroDivisionError), opened as file:
            fail_after(file, "a" if hasattr(file, "encoding") else b"a")
    lost = fs.open("models/a", "wb")
    lost.write(b"never closed")
    del lost, file, opened
    gc.collect()
    assert stored(volume) == {}


def test_a_state_may_be_saved_while_an_exception_is_handled(fs, volume):
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with fs.open("models/last", "wb") as file:
            file.write(b"state")
    assert stored(volume) == {"models/last": b"state"}


def close_in_except(opened):
    file = opened.open() if isinstance(opened, fsspec.core.OpenFile) else opened
    file.write("state" if hasattr(file, "encoding") else b"state")
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        (opened if opened is not file else file).close()


def close_in_finally(opened):
    file = opened.open() if isinstance(opened, fsspec.core.OpenFile) else opened
    with contextlib.suppress(ZeroDivisionError):
        try:
            file.write("state" if hasattr(file, "encoding") else b"state")
            raise ZeroDivisionError
        finally:
            (opened if opened is not file else file).close()


def leave_with_in_except(opened):
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with opened as file:
            file.write("state" if hasattr(file, "encoding") else b"state")


class SavesAtItsEnd:
    """Opens a file at the end of a ``with`` statement, and closes it because of an exception."""

    def __init__(self, opened):
        self.opened = opened

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        close_in_except(self.opened())
        return True


@pytest.mark.parametrize("kind", ["wb", "w", "url", "gzip", "text url"])
@pytest.mark.parametrize("end", [close_in_except, close_in_finally, leave_with_in_except])
def test_a_file_closed_because_of_an_exception_is_written(fs, volume, kind, end):
    end(open_new(fs, volume, kind))
    [(name, content)] = stored(volume).items()
    assert name == "models/a"
    assert (gzip.decompress(content) if kind == "gzip" else content) == b"state"


def open_new(fs, volume, kind):
    url = f"dlfs://{volume}!/models/a"
    return {
        "wb": lambda: fs.open("models/a", "wb"),
        "w": lambda: fs.open("models/a", "w"),
        "url": lambda: fsspec.open(url, "wb"),
        "gzip": lambda: fsspec.open(url, "wb", compression="gzip"),
        "text url": lambda: fsspec.open(url, "wt"),
    }[kind]()


@pytest.mark.parametrize("kind", ["wb", "w", "url", "gzip", "text url"])
def test_a_with_left_by_an_exception_discards_the_file(fs, volume, kind):
    def fail_in_a_stack():
        with contextlib.ExitStack() as stack:
            stack.enter_context(open_new(fs, volume, kind))
            raise KeyboardInterrupt

    with pytest.raises(ZeroDivisionError), open_new(fs, volume, kind) as file:
        fail_after(file, "state" if hasattr(file, "encoding") else b"state")
    with pytest.raises(KeyboardInterrupt):
        fail_in_a_stack()
    with pytest.raises(ZeroDivisionError), contextlib.closing(fs.open("models/a", "wb")) as file:
        fail_after(file, b"a")

    @contextlib.contextmanager
    def writing():
        with open_new(fs, volume, kind) as file:
            yield file

    with pytest.raises(ZeroDivisionError), writing():
        1 / 0  # noqa: B018
    assert stored(volume) == {}


def test_a_file_opened_at_the_end_of_a_with_is_written(fs, volume):
    with SavesAtItsEnd(lambda: fs.open("models/a", "wb")):
        raise ZeroDivisionError
    assert stored(volume) == {"models/a": b"state"}


def test_discard_discards(fs, volume):
    file = fs.open("models/a", "wb")
    file.write(b"a")
    file.discard()
    file.close()
    assert stored(volume) == {}


def test_a_transaction_commits_at_its_end(fs, volume):
    with fs.transaction:
        with fs.open("models/a", "wb") as file:
            file.write(b"a")
        assert stored(volume) == {}
    assert stored(volume) == {"models/a": b"a"}
    with pytest.raises(ZeroDivisionError), fs.transaction:
        fail_after(fs.open("models/b", "wb"), b"b")
    assert stored(volume) == {"models/a": b"a"}


def write_and_die(volume: str) -> None:
    file = fsspec.filesystem("dlfs", volume=volume).open("models/b", "wb")
    file.write(b"b" * 100_000)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_killed_writer_leaves_nothing(fs, volume):
    fs.pipe_file("models/a", b"a")
    child = multiprocessing.get_context("fork").Process(target=write_and_die, args=(volume,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert stored(volume) == {"models/a": b"a"}


def test_a_full_volume_is_an_error_of_the_close(fs, volume):
    fs.pipe_file("models/a", b"a")
    file = fs.open("models/b", "wb")
    file.write(bytes(9 * MIB))
    with pytest.raises(dlfs.SpaceError):
        file.close()
    assert file.closed
    assert stored(volume) == {"models/a": b"a"}
    fs.pipe_file("models/b", b"b")


def test_a_large_file_waits_in_a_temporary_file(fs, volume, monkeypatch):
    monkeypatch.setattr(new_files, "BUFFER_BYTES", 10_000)
    content = os.urandom(300_000)
    with fs.open("models/large", "wb") as file:
        for start in range(0, len(content), 7000):
            file.write(content[start : start + 7000])
        file.truncate()
    assert stored(volume) == {"models/large": content}


def test_a_file_is_made_longer_or_empty_by_a_truncation(fs, volume, monkeypatch):
    monkeypatch.setattr(new_files, "BUFFER_BYTES", 1000)
    for size in (10, 5000):
        with fs.open(f"models/long{size}", "wb") as file:
            file.write(b"abc")
            assert (file.truncate(size), file.tell()) == (size, 3)
            file.write(b"d")
        with fs.open(f"models/empty{size}", "wb") as file:
            file.write(bytes(size))
            file.truncate(0)
    assert stored(volume) == {
        "models/long10": b"abcd".ljust(10, b"\0"),
        "models/empty10": b"",
        "models/long5000": b"abcd".ljust(5000, b"\0"),
        "models/empty5000": b"",
    }


def test_old_versions_that_cannot_be_removed_fail_no_file(volume, monkeypatch, caplog):
    fs = fsspec.filesystem(
        "dlfs", volume=volume, keep_versions=1, lock_timeout_s=0.05, skip_instance_cache=True
    )

    def prune(*arguments, **options):
        raise dlfs.LockedError("import has the volume")

    fs.pipe_file("last/state", b"one")
    with monkeypatch.context() as context:
        context.setattr(dlfs.Volume, "prune", prune)
        fs.pipe_file("last/state", b"two")
    assert "old versions of last stay until the next file: import has" in caplog.text
    assert stored(volume) == {"last/state": b"two"}
    fs.pipe_file("last/state", b"three")
    with dlfs.open(volume) as opened:
        assert len(opened.versions("last")) == 1


def test_archives_are_written(fs):
    with fs.open("archives/a.zip", "wb") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("one", b"1")
    with fs.open("archives/a.zip") as file, zipfile.ZipFile(file) as archive:
        assert archive.read("one") == b"1"
    with fs.open("archives/a.tar", "wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(__file__, "test.py")
    with fs.open("archives/a.tar") as file, tarfile.open(fileobj=file) as archive:
        assert archive.getnames() == ["test.py"]


def test_files_that_are_closed_at_once_are_all_there(volume):
    def write(number: int) -> None:
        fs = fsspec.filesystem("dlfs", volume=volume, lock_timeout_s=60)
        fs.pipe_file(f"models/{number}", b"%d" % number)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, range(12)))
    assert stored(volume) == {f"models/{number}": b"%d" % number for number in range(12)}


def test_a_locked_volume_is_an_error_of_the_close(volume):
    fs = fsspec.filesystem("dlfs", volume=volume, lock_timeout_s=0.05, skip_instance_cache=True)
    with dlfs.open(volume) as opened, opened.writer("import") as other:
        other.add("a", b"a")
        with pytest.raises(dlfs.LockedError, match="import"):
            fs.pipe_file("models/a", b"a")
    fs = pickle.loads(pickle.dumps(fs))
    fs.pipe_file("models/a", b"a")
    assert fs.cat_file("models/a") == b"a"


def test_a_service_is_read_only() -> None:
    class Remote:
        uri = "unix:/run/dlfs.sock"

    class Shared:
        volume = Remote()

    sample = new_files.NewSample(Shared(), "unix:/run/dlfs.sock!/a/b", "a", "b", 1, None)
    with pytest.raises(OSError, match="Read-only"):
        sample.check(exclusive=False)
