"""Standard input as a source: archives of every compression, lists, and what is refused."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dlfs
from dlfs.errors import FormatError, TruncatedError, UsageError
from dlfs.ingest.importer import open_source
from dlfs.ingest.standard_input import StandardInput
from tests.support.files import tar, write_files
from tests.unit.ingest.taking import COMPRESSORS
from tests.unit.ingest.taking import take as take_all
from tests.unit.ingest.test_folders import Taken

SAMPLES = {b"a/empty": b"", b"a/one": b"1" * 700, b"b": os.urandom(300_000), b"c": b"22"}

Feed = Callable[[bytes], None]


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Feed]:
    """Return a function that makes standard input a pipe with some bytes."""
    opened = []

    def start(data: bytes) -> None:
        reader, writer = os.pipe()

        def write() -> None:
            with open(writer, "wb") as pipe:
                try:
                    pipe.write(data)
                except BrokenPipeError:
                    return

        threading.Thread(target=write).start()
        opened.append(os.fdopen(reader))
        monkeypatch.setattr(sys, "stdin", opened[-1])

    yield start
    for file in opened:
        file.close()


def archive(samples: dict[bytes, bytes], suffix: str = ".tar") -> bytes:
    return COMPRESSORS[suffix](tar(*((path.decode(), data) for path, data in samples.items())))


def take(*paths: str, layout: str = "path", **options: object) -> Taken:
    source = open_source(paths or "-", **options)  # type: ignore[arg-type]
    got = take_all(source, layout=layout, seed=1)  # type: ignore[arg-type]
    return {os.fsencode(path): data for path, (data, _) in got.items()}


@pytest.mark.parametrize("kind", [".tar", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"])
def test_archives_are_read_from_a_pipe(feed: Feed, kind: str) -> None:
    feed(archive(SAMPLES, kind))
    assert take() == SAMPLES


def test_a_redirected_file_and_other_archives(
    feed: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "more.tar").write_bytes(archive({b"more": b"m"}))
    (tmp_path / "stdin").write_bytes(archive(SAMPLES))
    with open(tmp_path / "stdin") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert take(str(tmp_path / "more.tar"), "-", layout="shuffled") == {
            **SAMPLES,
            b"more": b"m",
        }
    feed(archive({b"more": b"m"}))
    with pytest.raises(FormatError, match=r"got more in .*more\.tar and in standard input"):
        take(str(tmp_path / "more.tar"), "-")


def test_webdataset_from_a_pipe(feed: Feed) -> None:
    feed(archive({b"x.cls": b"7", b"x.jpg": b"jpeg", b"y.cls": b"8", b"y.jpg": b"other"}))
    source = open_source("-", format_name="webdataset", options={"attributes": "cls"})
    block, _ = source.blocks(layout="path", seed=0)
    assert (block.paths, block.attributes["cls"].tolist()) == ([b"x.jpg", b"y.jpg"], [7, 8])
    source.close()


@pytest.mark.parametrize("end", [b"\n", b"\0", b"\r\n"])
def test_lists_of_files(
    feed: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    name = "odd\nname" if end == b"\0" else "plain"
    write_files(tmp_path, {f"a/{name}": b"1", "b": b"22"})
    monkeypatch.chdir(tmp_path)
    feed(end.join([b"./a/" + name.encode(), b"b", b""]))
    assert take(format_name="list") == {f"a/{name}".encode(): b"1", b"b": b"22"}
    feed(b"b" + end + b"./b" + end)
    with pytest.raises(FormatError, match="standard input: line 2: expected each path once"):
        take(format_name="list")


def test_what_is_refused(feed: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = archive(SAMPLES)
    feed(whole[:-20_000])
    with pytest.raises(TruncatedError, match="import standard input: at byte"):
        take()
    feed(b"no archive" * 100)
    with pytest.raises(FormatError, match="import standard input: at byte"):
        take()
    with pytest.raises(UsageError, match="expected it once, got it 2 times"):
        take("-", "-")
    for name in ("folder", "zip"):
        with pytest.raises(UsageError, match=f"expected format tar, .*, got {name}; save it to a"):
            take(format_name=name)
    feed(b"PK\3\4 and more")
    with pytest.raises(UsageError, match="got a ZIP archive, whose directory is at its end"):
        take()
    for name in ("tar", "webdataset"):
        with pytest.raises(UsageError, match="expected no prefix_shards, for it has no name"):
            take(format_name=name, options={"prefix_shards": True})
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="expected a pipe or a file, got none"):
        take()
    terminal, other = os.openpty()
    with open(other) as file:
        monkeypatch.setattr(sys, "stdin", file)
        with pytest.raises(UsageError, match="expected a pipe or a file, got a terminal"):
            take()
    os.close(terminal)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_are_refused_because_it_is_read_once(feed: Feed, kind: bytes) -> None:
    memory = io.BytesIO(archive({b"one": b"1"})[:1024])
    memory.seek(0, io.SEEK_END)
    with tarfile.open(fileobj=memory, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("one"), io.BytesIO())
        link = tarfile.TarInfo("link")
        link.type, link.linkname = kind, "one"
        tar.addfile(link)
    feed(memory.getvalue()[1024:])
    with pytest.raises(UsageError, match=r"expected no links, .* link link; save the archive"):
        take()
    if kind == tarfile.SYMTYPE:
        feed(memory.getvalue()[1024:])
        assert take(options={"links": "skip"}) == {b"one": b""}


def test_it_goes_forward_only(feed: Feed) -> None:
    feed(b"0123456789")
    with StandardInput() as stdin:
        assert (stdin.seek(3), stdin.read(2), stdin.tell()) == (3, b"34", 5)
        assert stdin.seek(2, io.SEEK_CUR) == 7
        for target, whence in ((6, io.SEEK_SET), (0, io.SEEK_END)):
            with pytest.raises(OSError, match="Illegal seek"):
                stdin.seek(target, whence)
        assert stdin.seek(100) == 10
        assert stdin.read() == b""
        stdin.cancel()
        with pytest.raises(OSError, match="canceled"):
            stdin.read(1)
    stdin.close()


def test_an_interrupted_import_does_not_wait_for_the_pipe(tmp_path: Path) -> None:
    volume = str(tmp_path / "v.img")
    dlfs.format_volume(volume, size_bytes=8 << 20)
    words = [sys.executable, "-m", "dlfs.cli", "import", "-", volume, "--name", "x"]
    importing = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert importing.stdin is not None
    assert importing.stderr is not None
    try:
        importing.stdin.write(archive(SAMPLES)[:200_000])  # more than a pipe holds
        importing.stdin.flush()
        importing.send_signal(signal.SIGINT)
        assert importing.wait(60) == 130
        assert importing.stderr.read() == b"dlfs: interrupted\n"
    finally:
        importing.kill()
        importing.stdin.close()
        importing.stderr.close()
    with dlfs.open(volume) as opened:
        assert opened.datasets() == []
