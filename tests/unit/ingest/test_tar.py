"""Tar archives as sources: every compression, links, shards, and archives that are not whole."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlfs.errors import (
    DeviceError,
    DlfsError,
    FormatError,
    LimitError,
    NotFoundError,
    TruncatedError,
    UsageError,
)
from dlfs.ingest.formats.tar import TarOptions, TarSource
from dlfs.ingest.importer import open_source
from dlfs.ingest.source import BUFFER_BYTES
from tests.support.files import flip_bit, tar
from tests.unit.ingest.taking import COMPRESSORS
from tests.unit.ingest.taking import take as take_all

FILES = {f"d{i % 7}/{i:03d}.bin": os.urandom(i * 37 % 3000) for i in range(100)}


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.linkname = kind, target
    return header


def symbolic(name: str, target: str) -> tarfile.TarInfo:
    return special(name, tarfile.SYMTYPE, target)


def hard(name: str, target: str) -> tarfile.TarInfo:
    return special(name, tarfile.LNKTYPE, target)


def take(
    *paths: Path,
    layout: Any = "path",
    seed: int = 0,
    buffer_bytes: int = BUFFER_BYTES,
    **options: Any,
) -> list[Any]:
    source = TarSource(paths, TarOptions(**options))
    source.buffer_bytes = buffer_bytes
    got = take_all(source, layout=layout, seed=seed)
    return [(path, data) for path, (data, _) in got.items()]


@pytest.fixture(params=[".tar", ".tar.gz"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Path]:
    """Writes an archive, plain (indexed) and compressed (streamed)."""

    def write(*entries: Any, name: str = "a", **options: Any) -> Path:
        path = tmp_path / (name + request.param)
        path.write_bytes(COMPRESSORS[request.param](tar(*entries, **options)))
        return path

    return write


@pytest.mark.parametrize("layout", ["path", "shuffled"])
@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_takes_every_member(tmp_path: Path, suffix: str, layout: str) -> None:
    path = tmp_path / ("a" + suffix)
    path.write_bytes(COMPRESSORS[suffix](tar(*FILES.items())))
    got = take(path, layout=layout, buffer_bytes=5000)
    assert sorted(got) == sorted(FILES.items())


def test_plain_archives_know_their_size_and_shuffle_by_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar(*reversed(FILES.items())))
    source = TarSource([path])
    assert source.sample_count == len(FILES)
    assert source.sample_bytes == sum(map(len, FILES.values()))
    assert take(path) == sorted(FILES.items())
    one, two = (take(path, layout="shuffled", seed=seed) for seed in (1, 2))
    assert one != two
    assert one == take(path, layout="shuffled", seed=1)


def test_compressed_archives_do_not_know_their_size(tmp_path: Path) -> None:
    path = tmp_path / "a.tgz"
    path.write_bytes(gzip.compress(tar(*FILES.items())))
    source = TarSource([path])
    assert (source.sample_count, source.sample_bytes) == (None, None)


@pytest.mark.parametrize("layout", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_any_names_come_back(write: Callable[..., Path], layout: int) -> None:
    names = ["new\nline", "\udcff\udcfe", "x" * 255 + "/" + "y" * 255, "é"]
    files = {name: name.encode("utf-8", "surrogateescape") for name in names}
    assert sorted(take(write(*files.items(), layout=layout))) == sorted(files.items())


def test_names_are_normalised(write: Callable[..., Path]) -> None:
    path = write(special("./", tarfile.DIRTYPE), ("./a//b", b"1"), ("././c", b"2"), ("d/./e", b"3"))
    assert sorted(take(path)) == [("a/b", b"1"), ("c", b"2"), ("d/e", b"3")]


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "a/.."])
def test_hostile_names_are_refused(write: Callable[..., Path], name: str) -> None:
    with pytest.raises(FormatError, match=name):
        take(write(("good", b""), (name, b"x")))


def test_a_path_held_twice_is_an_error(write: Callable[..., Path]) -> None:
    with pytest.raises(FormatError, match=r"got same twice in .*/a.tar"):
        take(write(("same", b"1"), ("./same", b"2")))


def test_shards_are_one_dataset(write: Callable[..., Path]) -> None:
    one, two = write(("x", b"1"), name="s-0"), write(("y", b"2"), name="s-1")
    assert sorted(take(one, two)) == [("x", b"1"), ("y", b"2")]
    assert sorted(take(one, two, prefix_shards=True)) == [("s-0/x", b"1"), ("s-1/y", b"2")]


def test_a_path_in_two_shards_names_both(write: Callable[..., Path]) -> None:
    one, two = write(("x", b"1"), name="s-0"), write(("x", b"2"), name="s-1")
    with pytest.raises(FormatError, match=r"got x in .*/s-\d\.tar.* and in .*/s-\d\.tar"):
        take(one, two)
    assert len(take(one, two, prefix_shards=True)) == 2


def test_hard_links_are_samples(write: Callable[..., Path]) -> None:
    path = write(("a", b"data"), hard("b", "./a"), hard("c", "b"), ("d", b"other"))
    assert sorted(take(path)) == [("a", b"data"), ("b", b"data"), ("c", b"data"), ("d", b"other")]


def test_hard_links_stay_in_their_prefixed_shard(write: Callable[..., Path]) -> None:
    path = write(("a", b"data"), hard("b", "a"), name="s")
    assert sorted(take(path, prefix_shards=True)) == [("s/a", b"data"), ("s/b", b"data")]


def test_a_hard_link_to_nothing_is_an_error(write: Callable[..., Path]) -> None:
    with pytest.raises(FormatError, match="b: expected a hard link to an earlier member, got a"):
        take(write(hard("b", "a"), ("a", b"")))


def test_symbolic_links_are_followed_to_files_and_folders(write: Callable[..., Path]) -> None:
    path = write(
        symbolic("early", "d/x"),
        ("d/x", b"1"),
        ("d/y", b"2"),
        symbolic("folder", "d"),
        symbolic("e/up", "../folder/y"),
        hard("again", "early"),
    )
    assert sorted(take(path)) == [
        ("again", b"1"),
        ("d/x", b"1"),
        ("d/y", b"2"),
        ("e/up", b"2"),
        ("early", b"1"),
        ("folder/x", b"1"),
        ("folder/y", b"2"),
    ]


def test_symbolic_links_are_skipped_and_counted(write: Callable[..., Path]) -> None:
    source = TarSource([write(("a", b""), symbolic("b", "nowhere"))], TarOptions(links="skip"))
    paths = [path for block in source.blocks(layout="path", seed=0) for path in block.paths]
    assert paths == [b"a"]
    assert source.skipped == {"symbolic link": 1}


def test_symbolic_links_are_refused(write: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="b: expected no symbolic links"):
        take(write(("a", b""), symbolic("b", "a")), links="error")


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("nowhere", UsageError, "leads to nothing"),
        ("b", UsageError, "leads back to itself"),
        (".", UsageError, "leads to a folder above it"),
        ("..", UsageError, "leads to a folder above it"),
        ("../..", FormatError, "leads out of the archive"),
        ("/etc/passwd", FormatError, "leads out of the archive"),
    ],
)
def test_a_bad_symbolic_link_is_an_error_that_names_it(
    write: Callable[..., Path], target: str, error: type[DlfsError], message: str
) -> None:
    with pytest.raises(error, match=f"d/b: the symbolic link {message}"):
        take(write(("a", b""), symbolic("d/b", target)))


def test_links_that_lead_through_each_other_for_ever_are_an_error(
    write: Callable[..., Path],
) -> None:
    path = write(("f", b""), symbolic("a/up", "../b"), symbolic("b/up", "../a"))
    with pytest.raises(UsageError, match="leads to a folder above it"):
        take(path)


def test_special_members_and_empty_folders_are_counted(write: Callable[..., Path]) -> None:
    path = write(
        special("pipe", tarfile.FIFOTYPE),
        special("device", tarfile.CHRTYPE),
        special("empty", tarfile.DIRTYPE),
        special("full", tarfile.DIRTYPE),
        ("full/x", b""),
    )
    source = TarSource([path])
    assert len(list(source.blocks(layout="path", seed=0))) == 1
    assert source.skipped == {"special file": 2}
    assert source.empty_directories == [b"empty"]


@pytest.mark.parametrize("form", ["gnu", "posix"])
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_sparse_members_are_whole(tmp_path: Path, suffix: str, form: str) -> None:
    data = bytearray(1 << 20)
    data[0:5], data[500_000:500_010] = b"begin", b"middlepart"
    with (tmp_path / "sparse").open("wb") as out:
        out.truncate(len(data))
        out.write(b"begin")
        out.seek(500_000)
        out.write(data[500_000:500_010])
    with (tmp_path / "hole").open("wb") as out:
        out.truncate(70_000)
    (tmp_path / "plain").write_bytes(b"plain")
    path = tmp_path / ("a" + suffix)
    names = ["sparse", "hole", "plain"]
    subprocess.run(["tar", "-Scaf", path, f"--format={form}", "-C", tmp_path, *names], check=True)
    assert len(path.read_bytes()) < 200_000
    want = [("hole", bytes(70_000)), ("plain", b"plain"), ("sparse", bytes(data))]
    assert sorted(take(path)) == want


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.8, 0.95])
def test_a_cut_archive_is_an_error_that_names_it(
    tmp_path: Path, suffix: str, fraction: float
) -> None:
    whole = COMPRESSORS[suffix](tar(*FILES.items()))
    path = tmp_path / ("a" + suffix)
    path.write_bytes(whole[: int(len(whole) * fraction)])
    with pytest.raises(FormatError, match=rf"a{suffix}: at byte \d+: the archive"):
        take(path)


def test_every_cut_of_a_small_archive_is_noticed(tmp_path: Path) -> None:
    whole = tar(("a", b"x" * 700), ("b" * 200, b"y"))
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    path = tmp_path / "a.tar"
    for length in range(0, end + 512, 64):
        path.write_bytes(whole[:length])
        with pytest.raises(TruncatedError, match="ends too early"):
            take(path)


@pytest.mark.parametrize("suffix", [".tar", ".tar.zst"])
def test_a_damaged_header_is_an_error_and_not_the_end(tmp_path: Path, suffix: str) -> None:
    whole = bytearray(tar(("a", b"x"), ("b", b"y"), ("c", b"z")))
    whole[1024 + 20] ^= 1
    path = tmp_path / ("a" + suffix)
    path.write_bytes(COMPRESSORS[suffix](bytes(whole)))
    with pytest.raises(FormatError, match=r"at byte \d+: the archive is damaged: bad checksum"):
        take(path)


def test_a_damaged_gzip_checksum_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar(("a", b"x"))))
    flip_bit(tmp_path / "a.tar.gz", -6)
    with pytest.raises(FormatError, match="damaged"):
        take(tmp_path / "a.tar.gz")


def test_archives_joined_into_one_file_are_refused(write: Callable[..., Path]) -> None:
    path = write(("a", b"x"))
    both = path.read_bytes() + path.read_bytes()
    path.write_bytes(both)
    with pytest.raises(FormatError, match="expected nothing after the archive's end"):
        take(path)


def negative_size() -> bytes:
    header = bytearray(tar(("a", b"")))
    header[124:136] = b"\xff" * 12
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header)


def test_a_negative_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(negative_size())
    with pytest.raises(FormatError, match="size of -1 bytes"):
        take(tmp_path / "a.tar")


def test_an_archive_that_changes_is_an_error(write: Callable[..., Path]) -> None:
    path = write(*FILES.items())
    source = TarSource([path])
    source.buffer_bytes = 3000
    blocks = source.blocks(layout="path", seed=0)
    next(blocks)
    os.utime(path, ns=(5, 5))
    with pytest.raises(DeviceError, match="the file changed during the import"):
        list(blocks)


def test_an_archive_cut_after_its_index_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar(("a", b"x" * 5000)))
    source = TarSource([path])
    path.write_bytes(b"")
    with pytest.raises(TruncatedError, match="has become shorter"):
        list(source.blocks(layout="path", seed=0))


def test_a_missing_archive_and_other_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such archive"):
        TarSource([tmp_path / "a.tar"])
    with pytest.raises(UsageError, match="expected the name of an archive"):
        TarSource([tmp_path / "a.zip"])
    with pytest.raises(UsageError, match="expected an archive, got none"):
        TarSource([])


def test_more_shards_than_are_opened_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlfs.ingest.archives.ranges._OPEN_MAX", 3)
    paths = []
    for i in range(10):
        paths.append(tmp_path / f"{i}.tar")
        paths[-1].write_bytes(tar((f"{i}/a", b"%d" % i), (f"{i}/b", b"b%d" % i)))
    got = take(*paths, layout="shuffled", seed=4)
    want = [(f"{i}/a", b"%d" % i) for i in range(10)] + [(f"{i}/b", b"b%d" % i) for i in range(10)]
    assert sorted(got) == sorted(want)


# ---- sparse members, and absolute names ----------------------------------------------------------


def sparse_1_0(size: int, parts: dict[int, bytes], order: str) -> bytes:
    """A sparse member in GNU's format 1.0, with the sizes of file and data in a header.

    Args:
        size: size of the file in bytes.
        parts: data by offset.
        order: ``size first`` or ``size last``: the order of the sizes; ``no size`` leaves one out.
    """
    ends = {**{offset: len(data) for offset, data in parts.items()}, size: 0}
    lines = [len(ends), *(number for pair in ends.items() for number in pair)]
    table = "".join(f"{line}\n" for line in lines).encode()
    stored = table + bytes(-len(table) % 512) + b"".join(parts.values())
    fields = {
        "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "f",
        "GNU.sparse.realsize": str(size),
    }  # fmt: skip
    sizes = {"size": str(len(stored))}
    fields = {"size first": {**sizes, **fields}, "size last": {**fields, **sizes}}.get(
        order, fields
    )
    records = b""
    for name, value in fields.items():
        text = f" {name}={value}\n"
        length = len(text) + 2 if len(text) < 97 else len(text) + 3
        records += f"{length}{text}".encode()
    assert all(len(line) < 100 for line in records.split(b"\n"))
    extended = tarfile.TarInfo("h")
    extended.type, extended.size = tarfile.XHDTYPE, len(records)
    member = tarfile.TarInfo("GNUSparseFile.0/f")
    member.size = len(stored)
    head = extended.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % 512)
    return head + member.tobuf(tarfile.USTAR_FORMAT) + stored + bytes(-len(stored) % 512)


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
@pytest.mark.parametrize("order", ["size first", "size last", "no size"])
@pytest.mark.parametrize(
    "parts", [{0: b"abc"}, {5000: b"abc"}, {512: b"a" * 1024, 8192: b"b"}, {}, {9997: b"end"}]
)
def test_a_sparse_member_has_the_size_that_gnu_tar_reads(
    tmp_path: Path, suffix: str, order: str, parts: dict[int, bytes]
) -> None:
    want = bytearray(10_000)
    for offset, data in parts.items():
        want[offset : offset + len(data)] = data
    plain = tarfile.TarInfo("g")
    plain.size = 5
    raw = sparse_1_0(10_000, parts, order) + plain.tobuf() + b"after" + bytes(507) + bytes(1024)
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    got = take(path)
    assert got == [("f", bytes(want)), ("g", b"after")]
    if shutil.which("tar"):
        subprocess.run(["tar", "xf", str(path), "-C", str(tmp_path)], check=True)
        assert (tmp_path / "f").read_bytes() == want


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz"])
def test_absolute_names_are_stripped_if_the_caller_says_so(tmp_path: Path, name: str) -> None:
    data = tar(("/a/b.jpg", b"1"), hard("/a/c.jpg", "/a/b.jpg"))
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(FormatError, match=r"expected a relative name, got /a/b.jpg; .*=strip"):
        take_all(open_source(path))
    for format_name, want in (("tar", {"a/b.jpg", "a/c.jpg"}), ("webdataset", {"a/b.jpg"})):
        source = open_source(path, format_name=format_name, options={"absolute": "strip"})
        assert set(take_all(source)) == want


def test_a_size_that_no_memory_has_is_refused(tmp_path: Path) -> None:
    header = tarfile.TarInfo("a.bin")
    header.size = 1 << 62
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024)))
    with pytest.raises(
        LimitError, match=rf"{path}: a\.bin: expected a member that fits the memory"
    ):
        list(TarSource([str(path)]).blocks(layout="path", seed=0))
