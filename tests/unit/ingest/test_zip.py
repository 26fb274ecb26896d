"""ZIP archives as sources: every compression, names, links, and archives that are not whole."""

from __future__ import annotations

import io
import os
import shutil
import stat
import struct
import subprocess
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlfs.errors import (
    ChecksumError,
    DeviceError,
    DlfsError,
    FormatError,
    LimitError,
    NotFoundError,
    SpaceError,
    TruncatedError,
    UsageError,
)
from dlfs.ingest.attributes import AttributedSource, label_rule
from dlfs.ingest.formats import zip as zip_format
from dlfs.ingest.formats.zip import ZipOptions, ZipSource
from dlfs.ingest.importer import open_source
from dlfs.volume.volume import Volume
from tests.support.files import cut, flip_bit
from tests.unit.ingest.taking import import_all, import_by_command, refused
from tests.unit.ingest.taking import take as take_all

FILES = {f"d{i % 7}/{i:03d}.bin": os.urandom(i * 37 % 3000) for i in range(100)}
METHODS = {
    "stored": zipfile.ZIP_STORED,
    "deflate": zipfile.ZIP_DEFLATED,
    "bzip2": zipfile.ZIP_BZIP2,
    "lzma": zipfile.ZIP_LZMA,
}


def entry(name: str, mode: int = 0, *, host: int = 3, **fields: Any) -> zipfile.ZipInfo:
    """A header with a Unix mode, of a system, and other fields of zipfile's."""
    made = zipfile.ZipInfo(name)
    made.create_system, made.external_attr = host, mode << 16
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def link(name: str, target: str) -> tuple[zipfile.ZipInfo, bytes]:
    return entry(name, stat.S_IFLNK | 0o777), os.fsencode(target)


def zip_bytes(*entries: tuple[str | zipfile.ZipInfo, bytes], method: str = "stored") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", METHODS[method]) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return out.getvalue()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes an archive of (name or header, bytes)."""

    def write(*entries: Any, name: str = "a.zip", method: str = "stored") -> Path:
        path = tmp_path / name
        path.write_bytes(zip_bytes(*entries, method=method))
        return path

    return write


def take(*paths: Path, layout: Any = "path", seed: int = 0, **options: Any) -> dict[str, bytes]:
    source = ZipSource([str(path) for path in paths], ZipOptions(**options))
    source.buffer_bytes = 5000
    return {path: data for path, (data, _) in take_all(source, layout=layout, seed=seed).items()}


def directory_entry(data: bytes, number: int = 0) -> int:
    """The offset of a member's entry in the directory."""
    at = -1
    for _ in range(number + 1):
        at = data.index(b"PK\1\2", at + 1)
    return at


def patched(path: Path, offset: int, form: str, value: int) -> Path:
    """The archive with another number in the first entry of its directory."""
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, directory_entry(data) + offset, value)
    path.write_bytes(data)
    return path


CRC, COMPRESSED, SIZE, POSITION = 16, 20, 24, 42
"""Offsets of fields in an entry of the directory."""


@pytest.mark.parametrize("layout", ["path", "shuffled"])
@pytest.mark.parametrize("method", METHODS)
def test_takes_every_member(write: Callable[..., Path], method: str, layout: str) -> None:
    path = write(*FILES.items(), method=method)
    assert take(path, layout=layout, seed=3) == FILES


def test_sizes_are_known_and_the_order_is_drawn_from_the_seed(write: Callable[..., Path]) -> None:
    path = write(*reversed(FILES.items()))
    source = ZipSource([str(path)])
    assert source.sample_count == len(FILES)
    assert source.sample_bytes == sum(map(len, FILES.values()))
    assert source.gives_shuffled
    source.close()
    assert list(take(path)) == sorted(FILES)
    one, two = (list(take(path, layout="shuffled", seed=seed)) for seed in (1, 2))
    assert one != two
    assert one == list(take(path, layout="shuffled", seed=1))


def test_archives_of_info_zip_with_links_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    (folder / "cat").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "cat/1.jpg").write_bytes(b"one" * 1000)
    (folder / "cat/odd \udcff\n.jpg").write_bytes(b"odd")
    (folder / "cat/é.jpg").write_bytes(b"accent")
    (folder / "dog").symlink_to("cat")
    subprocess.run(["zip", "-qry", tmp_path / "a.zip", "photos"], cwd=tmp_path, check=True)
    source = ZipSource([str(tmp_path / "a.zip")])
    assert source.empty_directories == [b"photos/empty"]
    want = {
        f"photos/{animal}/{name}": data
        for animal in ("cat", "dog")
        for name, data in (("1.jpg", b"one" * 1000), ("odd \udcff\n.jpg", b"odd"),
                           ("é.jpg", b"accent"))
    }  # fmt: skip
    assert {path: data for path, (data, _) in take_all(source).items()} == want


def test_through_the_importer_and_the_command_line(
    write: Callable[..., Path], tmp_path: Path, volume: Volume
) -> None:
    path = write(("cat/1", b"a"), ("dog/2", b"b" * 9000))
    want = {"cat/1": b"a", "dog/2": b"b" * 9000}
    assert import_all(volume, path) == want
    labelled = take_all(AttributedSource(open_source(path), [label_rule()]))
    assert {name: found["label"] for name, (_, found) in labelled.items()} == {
        "cat/1": "cat",
        "dog/2": "dog",
    }
    shutil.copy(path, tmp_path / "b.zip")
    command = f"'{tmp_path}/*.zip' V --prefix-shards --label-from-path"
    assert import_by_command(tmp_path, command) == {
        f"{shard}/{name}": data for shard in "ab" for name, data in want.items()
    }


def test_exported_archives_come_back(volume: Volume, tmp_path: Path) -> None:
    from dlfs.ingest.export.targets import export_dataset

    with volume.writer("n") as writer:
        for name, data in FILES.items():
            writer.add(name.encode(), data)
        writer.add_directory(b"none/here")
        writer.seal()
    with volume["n"] as dataset:
        export_dataset(dataset, str(tmp_path / "x.zip"))
    source = ZipSource([str(tmp_path / "x.zip")])
    assert source.empty_directories == [b"none/here"]
    assert {path: data for path, (data, _) in take_all(source).items()} == FILES


# ---- names ---------------------------------------------------------------------------------------


def test_names_are_normalised(write: Callable[..., Path]) -> None:
    path = write(("./", b""), ("./a//b", b"1"), ("././c", b"2"), ("d/./e", b"3"))
    assert take(path) == {"a/b": b"1", "c": b"2", "d/e": b"3"}


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "a/.."])
def test_hostile_names_are_refused(write: Callable[..., Path], name: str) -> None:
    with pytest.raises(FormatError, match=name):
        take(write(("good", b""), (name, b"x")))


def test_absolute_names_are_stripped_on_request(write: Callable[..., Path]) -> None:
    path = write(("/a/b", b"1"))
    with pytest.raises(FormatError, match="absolute=strip removes the slash"):
        take(path)
    assert take(path, absolute="strip") == {"a/b": b"1"}


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_path_held_twice_is_an_error(write: Callable[..., Path]) -> None:
    with pytest.raises(FormatError, match=r"got same twice in .*/a.zip"):
        take(write(("same", b"1"), ("./same", b"2")))
    with pytest.raises(FormatError, match=r"got same twice in .*/a.zip"):
        take(write(("same", b"1"), ("same", b"1")))
    one, two = write(("x", b"1"), name="s-0.zip"), write(("x", b"2"), name="s-1.ZIP")
    with pytest.raises(FormatError, match=r"got x in .*/s-0.zip and in .*/s-1.ZIP"):
        take(one, two)
    assert take(one, two, prefix_shards=True) == {"s-0/x": b"1", "s-1/x": b"2"}


def test_names_are_bytes_unless_their_encoding_is_known(write: Callable[..., Path]) -> None:
    """zipfile writes only ASCII without the mark of UTF-8, so bytes are put in its place."""
    path = write(("aaaa.jpg", b"1"), ("ü.jpg", b"2"))
    japanese = "表".encode("cp932")  # its second byte is a backslash
    path.write_bytes(path.read_bytes().replace(b"aaaa", japanese + b"aa"))
    assert take(path) == {os.fsdecode(japanese) + "aa.jpg": b"1", "ü.jpg": b"2"}
    assert take(path, encoding="cp932") == {"表aa.jpg": b"1", "ü.jpg": b"2"}
    with pytest.raises(FormatError, match="damaged: 'ascii' codec"):
        take(path, encoding="ascii")
    with pytest.raises(UsageError, match="expected an encoding such as cp932, got 'nonsense'"):
        ZipOptions(encoding="nonsense")


def test_backslashes_separate_folders_only_in_archives_of_windows(
    write: Callable[..., Path],
) -> None:
    path = write((entry("a\\b.jpg", host=0), b"1"), (entry("a\\c.jpg", host=3), b"2"))
    assert take(path) == {"a/b.jpg": b"1", "a\\c.jpg": b"2"}
    with pytest.raises(FormatError, match=r"expected a name without '\.\.'"):
        take(write((entry("..\\b.jpg", host=0), b"1")))


def test_other_names_are_refused(write: Callable[..., Path]) -> None:
    path = write(("aXb", b"1"))
    path.write_bytes(path.read_bytes().replace(b"aXb", b"a\0b"))
    with pytest.raises(FormatError, match="a\\\\x00b"):
        take(path)
    with pytest.raises(LimitError, match="x" * 300):
        take(write(("x" * 300, b"1")))
    with pytest.raises(FormatError, match="member 0: expected a name"):
        take(write((".", b"1")))
    with pytest.raises(FormatError, match="a/: expected no data in a folder, got 1 bytes"):
        take(write(("a/", b"1")))


def test_what_macos_adds_is_left_out_and_counted(write: Callable[..., Path]) -> None:
    path = write(("a/x.jpg", b"1"), ("__MACOSX/", b""), ("__MACOSX/a/._x.jpg", b"fork"))
    source = ZipSource([str(path)])
    assert source.skipped == {"file or folder in __MACOSX": 2}
    assert source.empty_directories == []
    assert list(take_all(source)) == ["a/x.jpg"]
    assert list(take(path, macos="keep")) == ["__MACOSX/a/._x.jpg", "a/x.jpg"]


# ---- links, folders and special files ------------------------------------------------------------


def test_symbolic_links(write: Callable[..., Path]) -> None:
    path = write(link("early", "d/x"), ("d/x", b"1"), ("d/y", b"2"), link("e/up", "../d"))
    followed = {"d/x": b"1", "d/y": b"2", "e/up/x": b"1", "e/up/y": b"2", "early": b"1"}
    assert take(path) == followed
    source = ZipSource([str(path)], ZipOptions(links="skip"))
    assert source.skipped == {"symbolic link": 2}
    assert list(take_all(source)) == ["d/x", "d/y"]
    with pytest.raises(UsageError, match="early: expected no symbolic links"):
        take(path, links="error")


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("nowhere", UsageError, "leads to nothing"),
        ("b", UsageError, "leads back to itself"),
        ("..", UsageError, "leads to a folder above it"),
        ("../..", FormatError, "leads out of the archive"),
        ("/etc/passwd", FormatError, "leads out of the archive"),
        ("x" * 5000, LimitError, ""),
    ],
)
def test_bad_links_are_named(
    write: Callable[..., Path], target: str, error: type[DlfsError], message: str
) -> None:
    wanted = f"the symbolic link {message}" if message else "expected a symbolic link of at most"
    with pytest.raises(error, match=f"d/b: {wanted}"):
        take(write(("a", b""), link("d/b", target)))


def test_folders_and_special_files(write: Callable[..., Path]) -> None:
    path = write(
        ("full/x", b""),
        ("full/", b""),
        ("slash/", b""),
        (entry("unix", stat.S_IFDIR | 0o755), b""),
        (entry("windows", host=0, external_attr=0x10), b""),
        (entry("pipe", stat.S_IFIFO), b""),
    )
    source = ZipSource([str(path)])
    assert source.skipped == {"special file": 1}
    assert source.empty_directories == [b"slash", b"unix", b"windows"]
    assert list(take_all(source)) == ["full/x"]


# ---- large and many ------------------------------------------------------------------------------


def test_zip64(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("large", "w", force_zip64=True) as file:
            file.write(b"x" * 10_000)
        for number in range(70_000):  # more than the old directory counts
            archive.writestr(f"{number:05d}", b"")
    got = take(path)
    assert got.pop("large") == b"x" * 10_000
    assert len(got) == 70_000


def test_a_directory_beyond_4_gib(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("first", b"1")
        file.seek((1 << 32) + 5)  # a hole
        archive.start_dir = file.tell()
        archive.writestr("last", b"2")
    assert take(path) == {"first": b"1", "last": b"2"}


def test_many_archives_have_one_open_file(tmp_path: Path, write: Callable[..., Path]) -> None:
    paths = [write((f"{i}/a", b"%d" % i), (f"{i}/b", b"b"), name=f"{i}.zip") for i in range(20)]
    source = ZipSource(list(map(str, paths)))
    for block in source.blocks(layout="shuffled", seed=1):
        opened = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]
        assert not [name for name in opened if name.endswith(".zip")]
        assert len(block.paths) == 40
    source.close()


# ---- what is damaged or hostile ------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_cut_is_noticed(tmp_path: Path, method: str) -> None:
    whole = zip_bytes(("a", b"x" * 700), ("b" * 100, b"y"), method=method)
    path = tmp_path / "a.zip"
    for length in range(1, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match=r"import .*a\.zip") as caught:
            take(path)
        assert isinstance(caught.value, TruncatedError) == (length >= 4)


@pytest.mark.parametrize("method", METHODS)
def test_no_flipped_bit_changes_a_sample(tmp_path: Path, method: str) -> None:
    """Each is an error, or changes what is no part of a sample: its time, its place."""
    want = {"a": b"x" * 50 + b"yz" * 9, "b/c": b"y"}
    whole = zip_bytes(*want.items(), method=method)
    path = tmp_path / "a.zip"
    for bit in range(0, 8 * len(whole), 3):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            got = take(path)
        except DlfsError:
            continue
        assert set(got.values()) <= set(want.values()), bit


def test_a_wrong_crc_names_the_member(write: Callable[..., Path]) -> None:
    path = write(("good", b"1"), ("bad", b"middle" * 99))
    flip_bit(path, path.read_bytes().index(b"middle"))
    with pytest.raises(ChecksumError, match=r"a.zip: bad: expected data of the CRC-32"):
        take(path)
    path = write(("empty", b""))
    with pytest.raises(ChecksumError, match="empty: expected data of the CRC-32"):
        take(patched(path, CRC, "<I", 5))


def test_encrypted_members_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"secret")
    subprocess.run(["zip", "-q", "-P", "word", "a.zip", "x"], cwd=tmp_path, check=True)
    with pytest.raises(FormatError, match="x: expected a member that is not encrypted"):
        ZipSource([str(tmp_path / "a.zip")])


@pytest.mark.parametrize(("number", "name"), [(9, "Deflate64"), (93, "Zstandard"), (77, "77")])
def test_other_compressions_are_refused_at_once(
    write: Callable[..., Path], number: int, name: str
) -> None:
    path = patched(write(("x", b"1")), 10, "<H", number)
    with pytest.raises(FormatError, match=f"x: expected compression stored, .*{name}"):
        ZipSource([str(path)])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [699, 701, 1 << 31])
def test_a_wrong_size_is_an_error(write: Callable[..., Path], method: str, size: int) -> None:
    path = patched(write(("x", os.urandom(700)), method=method), SIZE, "<I", size)
    with pytest.raises(FormatError, match="x: "):
        take(path)


def test_a_size_that_no_memory_has_is_refused_at_once(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = patched(write(("x", b"1" * 100), method="bzip2"), SIZE, "<I", 1 << 31)
    monkeypatch.setattr("dlfs.ingest.archives.zip_archive._memory_bytes", lambda: 1 << 30)
    with pytest.raises(LimitError, match=f"x: expected a member that fits .* {1 << 31} bytes"):
        ZipSource([str(path)])


def test_members_that_share_their_data_are_refused(write: Callable[..., Path]) -> None:
    path = write(("a", b"1" * 100), ("b", b"1" * 100))
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, directory_entry(data, 1) + POSITION, 0)
    path.write_bytes(data)
    with pytest.raises(FormatError, match="b: expected members that do not overlap, got one at"):
        ZipSource([str(path)])
    path = patched(write(("a", b"1" * 100)), COMPRESSED, "<I", 10_000)
    with pytest.raises(FormatError, match="a: expected the member's 10000 bytes in front of the"):
        ZipSource([str(path)])


def test_a_bomb_is_refused_before_anything_is_written(
    write: Callable[..., Path], volume: Volume
) -> None:
    """10 KB of zeros that become 10 MB, four times: more than the volume has."""
    path = write(*((str(i), bytes(10 << 20)) for i in range(4)), method="deflate")
    assert path.stat().st_size < 60_000
    with refused(volume, SpaceError, "free"):
        import_all(volume, path)


def test_memory_is_bounded_where_data_unpacks_to_more_than_its_size(
    write: Callable[..., Path],
) -> None:
    """bzip2 makes 60 MB of 46 bytes for each 900 KB: a piece of it is unpacked at a time."""
    import tracemalloc

    path = write(("x", bytes(60 << 20)), method="bzip2")
    patched(path, SIZE, "<I", 5)
    tracemalloc.start()
    with pytest.raises(ChecksumError, match="x: expected data"):
        take(path)
    assert tracemalloc.get_traced_memory()[1] < 200 << 20
    tracemalloc.stop()


def test_an_archive_that_changes_is_an_error(write: Callable[..., Path]) -> None:
    path = write(*FILES.items())
    source = ZipSource([str(path)])
    source.buffer_bytes = 3000
    blocks = source.blocks(layout="path", seed=0)
    next(blocks)
    os.utime(path, ns=(5, 5))
    with pytest.raises(DeviceError, match="the file changed during the import"):
        list(blocks)
    source.close()
    source = ZipSource([str(path)])
    cut(path, 10)
    with pytest.raises(FormatError, match=r"a.zip: d0/"):
        list(source.blocks(layout="path", seed=0))
    source.close()


def test_what_is_no_archive(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such archive"):
        ZipSource([str(tmp_path / "a.zip")])
    (tmp_path / "b.zip").mkdir()
    with pytest.raises(UsageError, match=r"b\.zip: expected a ZIP archive, got a folder"):
        open_source(tmp_path / "b.zip", format_name="zip")
    (tmp_path / "c.zip").write_bytes(b"something else")
    with pytest.raises(FormatError, match=r"c\.zip: expected a ZIP archive, got a file without"):
        open_source(tmp_path / "c.zip")
    with pytest.raises(UsageError, match="expected a ZIP archive, got none"):
        ZipSource([])
    (tmp_path / "d.zip").write_bytes(zip_bytes())
    assert take(tmp_path / "d.zip") == {}


def test_zlib_bombs_of_impossible_sizes(write: Callable[..., Path]) -> None:
    path = write(("x", b"1"), method="deflate")
    stored = len(zlib.compress(b"1", 6)) - 6
    with pytest.raises(FormatError, match=f"x: expected at most {stored * 1032} bytes of {stored}"):
        take(patched(path, SIZE, "<I", stored * 1032 + 1))


def test_the_number_of_threads_changes_nothing(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(*FILES.items(), method="deflate")
    found = []
    for threads in (1, 7):
        monkeypatch.setattr(zip_format, "_THREADS_MAX", threads)
        monkeypatch.setattr(zip_format, "_MEMBERS", 2)
        found.append(list(take(path, layout="shuffled", seed=5).items()))
    assert found[0] == found[1]
    assert dict(found[0]) == FILES
