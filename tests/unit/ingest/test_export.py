"""Datasets written back: the same bytes under the same names, and nothing outside the target."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import dlfs
from dlfs.dataset.dataset import Dataset
from dlfs.errors import (
    ChecksumError,
    DeviceError,
    DlfsError,
    ExistsError,
    FormatError,
    SpaceError,
    UsageError,
)
from dlfs.ingest import files
from dlfs.ingest.export import samples
from dlfs.ingest.export.targets import export_dataset, export_kind, export_stream
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.ingest.progress import Progress
from dlfs.volume.volume import Volume
from tests.support.files import write_at
from tests.support.volumes import new_volume, read_dataset, write_dataset

FILES = {
    b"a": b"1",
    b"d/new\nline": b"",
    b"d/\xff\xfe": b"3" * 5000,
    b"d/e/f g": b"4" * 70_000,
    b".hidden": b"5",
    b"/".join([b"n" * 255] * 15): b"deep",
}


@pytest.fixture
def dataset(volume: Volume) -> Iterator[Dataset]:
    write_dataset(volume, "n", FILES)
    with volume["n"] as opened:
        yield opened


def tree(folder: Path) -> dict[bytes, bytes]:
    root = os.fsencode(folder)
    found = {}
    for base, _, names in os.walk(root):
        for name in names:
            path = Path(os.fsdecode(base + b"/" + name))
            found[os.fsencode(path)[len(root) + 1 :]] = path.read_bytes()
    return found


def test_a_folder_gets_every_sample(dataset: Dataset, tmp_path: Path) -> None:
    seen: list[Progress] = []
    report = export_dataset(dataset, tmp_path / "new" / "out", progress=seen.append, kind="folder")
    assert tree(tmp_path / "new" / "out") == FILES
    assert report.sample_count == len(FILES)
    assert report.sample_bytes == seen[-1].bytes_done == dataset.sample_bytes


def test_few_open_directories_are_enough(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "DIRECTORIES_MAX", 2)
    monkeypatch.setattr(samples, "BATCH_SAMPLES_MAX", 1)
    before = len(os.listdir("/proc/self/fd"))
    export_dataset(dataset, tmp_path, kind="folder")
    assert tree(tmp_path) == FILES
    assert len(os.listdir("/proc/self/fd")) <= before + 4  # what the dataset itself opened


def test_a_folder_with_entries_is_refused_unless_forced(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"longer than the sample")
    (tmp_path / "mine").write_bytes(b"kept")
    with pytest.raises(ExistsError, match="expected an empty folder"):
        export_dataset(dataset, tmp_path, kind="folder")
    export_dataset(dataset, tmp_path, force=True, kind="folder")
    assert tree(tmp_path) == FILES | {b"mine": b"kept"}


def test_links_in_the_target_are_not_followed(dataset: Dataset, tmp_path: Path) -> None:
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    out.mkdir()
    (outside / "a").write_bytes(b"untouched")
    (out / "a").symlink_to(outside / "a")
    export_dataset(dataset, out, force=True, kind="folder")
    assert tree(outside) == {b"a": b"untouched"}
    assert not (out / "a").is_symlink()
    (out / "a").unlink()
    for name in ("new\nline", "e/f g", "e"):
        path = out / "d" / name
        path.rmdir() if path.is_dir() else path.unlink()
    Path(os.fsdecode(os.fsencode(out) + b"/d/\xff\xfe")).unlink()
    (out / "d").rmdir()
    (out / "d").symlink_to(outside)
    with pytest.raises(ExistsError, match="in its way"):
        export_dataset(dataset, out, force=True, kind="folder")
    assert tree(outside) == {b"a": b"untouched"}


def test_a_directory_in_the_way_is_an_error(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ExistsError, match="a: another file or directory is in its way"):
        export_dataset(dataset, tmp_path, force=True, kind="folder")


def test_a_target_that_is_no_folder_is_an_error(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DeviceError, match="export to"):
        export_dataset(dataset, tmp_path / "file", kind="folder")


@pytest.mark.parametrize("path", [b"../x", b"/x", b"a/../../x", b"", b"a//b", b"."])
def test_paths_that_would_escape_are_refused(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: bytes
) -> None:
    monkeypatch.setattr(Dataset, "paths_of", lambda _self, indices: [path] * len(indices))
    with pytest.raises(FormatError, match="export the sample"):
        export_dataset(dataset, tmp_path / "out", kind="folder")
    assert tree(tmp_path) == {}


READERS: dict[str, Callable[[Path], bytes]] = {
    ".tar": lambda path: path.read_bytes(),
    ".tar.zst": lambda path: (
        zstandard.ZstdDecompressor()
        .stream_reader(path.read_bytes(), read_across_frames=True)
        .read()
    ),
}


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz"])
def test_an_archive_gets_every_sample_and_can_be_imported(
    volume: Volume, dataset: Dataset, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / ("out" + suffix)
    report = export_dataset(dataset, path)
    assert report.sample_count == len(FILES)
    import_dataset(volume, open_source(path), "again")
    assert read_dataset(volume, "again") == FILES
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_an_archive_is_what_others_read(dataset: Dataset, tmp_path: Path) -> None:
    export_dataset(dataset, tmp_path / "out.tar.gz", kind="tar")
    with tarfile.open(tmp_path / "out.tar.gz", errors="surrogateescape") as archive:
        names = [member.name.encode("utf-8", "surrogateescape") for member in archive]
    assert sorted(names) == sorted(FILES)


def test_the_same_dataset_gives_the_same_archive(dataset: Dataset, tmp_path: Path) -> None:
    for name in ("a.tar.gz", "b.tar.gz"):
        export_dataset(dataset, tmp_path / name, kind="tar")
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()


def test_an_archive_that_is_there_is_kept_unless_forced(dataset: Dataset, tmp_path: Path) -> None:
    path = tmp_path / "out.tar"
    path.write_bytes(b"mine")
    with pytest.raises(ExistsError, match="there already"):
        export_dataset(dataset, path, kind="tar")
    assert path.read_bytes() == b"mine"
    export_dataset(dataset, path, force=True, kind="tar")
    assert tarfile.is_tarfile(path)


def test_an_interrupted_archive_leaves_nothing(dataset: Dataset, tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.samples_done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_dataset(dataset, tmp_path / "out.tar.zst", progress=interrupt, kind="tar")
    assert list(tmp_path.iterdir()) == []


def test_other_names_are_no_archives(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected the name of an archive"):
        export_dataset(dataset, tmp_path / "out.zip", kind="tar")
    with pytest.raises(DeviceError, match="export to"):
        export_dataset(dataset, tmp_path / "missing" / "out.tar", kind="tar")


def test_an_empty_dataset_is_exported(volume: Volume, tmp_path: Path) -> None:
    volume.writer("empty").seal()
    with volume["empty"] as dataset:
        assert export_dataset(dataset, tmp_path / "out", kind="folder").sample_count == 0
        assert export_dataset(dataset, tmp_path / "out.tar", kind="tar").sample_count == 0
    assert open_source(tmp_path / "out.tar").sample_count == 0


# ---- kinds of targets ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("out", "folder"),
        ("run-1.0", "folder"),
        (".hidden", "folder"),
        ("x.zip/", "folder"),
        ("x.rar/", "folder"),
        ("a.b/c", "folder"),
        ("x.tar", "tar"),
        ("x.TGZ", "tar"),
        ("x.tar.zst", "tar"),
        ("x.zip", "zip"),
        ("x.arrow", "arrow"),
        ("x.feather", "arrow"),
        ("x.parquet", "parquet"),
        ("x.pq", "parquet"),
    ],
)
def test_a_name_says_what_is_written(target: str, kind: str) -> None:
    assert export_kind(target) == kind


@pytest.mark.parametrize("target", ["x.rar", "out/x.h5", "x.tar.lz4", "photos.d"])
def test_a_suffix_of_another_format_is_refused(
    target: str, dataset: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"ends in one of \.tar, .*\.parquet, got \."):
        export_dataset(dataset, tmp_path / target)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / target).mkdir(parents=True)
    assert export_dataset(dataset, tmp_path / target).sample_count == len(FILES)  # a folder it is


def test_a_slash_makes_a_folder(dataset: Dataset, tmp_path: Path) -> None:
    export_dataset(dataset, f"{tmp_path}/x.zip/")
    assert tree(tmp_path / "x.zip") == FILES


def test_a_stream_is_a_tar_archive(dataset: Dataset) -> None:
    stream = io.BytesIO()
    assert export_stream(dataset, stream).sample_count == len(FILES)
    stream.seek(0)
    with tarfile.open(fileobj=stream, errors="surrogateescape") as archive:
        got = {os.fsencode(member.name): archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert got == FILES


def test_a_full_stream_is_reported(dataset: Dataset) -> None:
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(SpaceError, match="export to"):
        export_stream(dataset, full)


def test_a_zip_archive_is_what_others_read(volume: Volume, tmp_path: Path) -> None:
    files = {path: data for path, data in FILES.items() if b"\xff" not in path}
    files["été/字".encode()] = b"text"
    write_dataset(volume, "text", files)
    with volume["text"] as found:
        report = export_dataset(found, tmp_path / "x.zip", kind="zip")
        assert (report.sample_count, report.sample_bytes) == (len(files), found.sample_bytes)
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        assert archive.testzip() is None
        assert {name.encode(): archive.read(name) for name in archive.namelist()} == files
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.zip"]


def test_a_zip_archive_has_names_of_text(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"paths of UTF-8, which ZIP holds, got d/\\xff"):
        export_dataset(dataset, tmp_path / "x.zip", kind="zip")
    assert list(tmp_path.iterdir()) == []


# ---- what cannot be read or written --------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[Dataset]:
    """A dataset of eight samples, of which 2 and 5 are damaged."""
    image = new_volume(tmp_path / "volume.img", size_bytes=16 << 20)
    with dlfs.open(str(image)) as volume:
        with volume.writer("d") as writer:
            for number in range(8):
                writer.add(f"d/{number}", bytes([number]) * 5000, attributes={"n": number})
        with volume["d"] as found:
            places = [found.stat(number).offset_bytes for number in (2, 5)]
    for place in places:
        write_at(image, place + 100, b"wrong")
    with dlfs.open(str(image)) as volume, volume["d"] as found:
        yield found


@pytest.mark.parametrize("name", ["out", "x.tar", "x.zip", "x.arrow", "x.parquet"])
def test_bad_samples_are_left_out_where_that_is_wanted(
    volume: Volume, damaged: Dataset, tmp_path: Path, name: str
) -> None:
    target = tmp_path / "target" / name
    target.parent.mkdir()
    with pytest.raises(ChecksumError, match="d/2"):
        export_dataset(damaged, target)
    bad: list[DlfsError] = []
    report = export_dataset(damaged, target, force=True, on_bad=bad.append)
    assert (report.sample_count, report.sample_bytes, report.bad_count) == (6, 30_000, 2)
    assert sorted(str(error).partition("'d/")[2][0] for error in bad) == ["2", "5"]
    expected = {f"d/{n}".encode(): bytes([n]) * 5000 for n in range(8) if n not in (2, 5)}
    if name == "x.zip":
        with zipfile.ZipFile(target) as archive:
            assert {n.encode(): archive.read(n) for n in archive.namelist()} == expected
        return
    import_dataset(volume, open_source(target), "again")
    with volume["again"] as again:
        assert {path: again.get(path) for path in again.paths()} == expected
        if name in ("x.arrow", "x.parquet"):
            assert again.column("n").tolist() == [0, 1, 3, 4, 6, 7]


@pytest.mark.root
def test_a_full_file_system_is_reported_and_nothing_half_written_is_left(
    dataset: Dataset, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "none", small], check=True)
    try:
        for name in ("x.tar", "x.arrow", "folder"):
            with pytest.raises(SpaceError, match=r"export to .*No space left"):
                export_dataset(dataset, small / name)
        whole = tree(small)
        assert set(whole) < {b"folder/" + path for path in FILES}
        assert all(data == FILES[path.removeprefix(b"folder/")] for path, data in whole.items())
    finally:
        subprocess.run(["umount", small], check=True)


NAMES = st.binary(min_size=1, max_size=9).filter(
    lambda name: not set(name) & {0, 47} and name not in (b".", b"..")
)
TREES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map(b"/".join), st.binary(max_size=60), max_size=9
).filter(lambda files: not any(b.startswith(a + b"/") for a in files for b in files))


@settings(max_examples=20)
@given(files=TREES)
def test_any_dataset_goes_round(
    tmp_path_factory: pytest.TempPathFactory, files: dict[bytes, bytes]
) -> None:
    base = tmp_path_factory.mktemp("round")
    with dlfs.open(new_volume(f"mem:{uuid4().hex}?size=8MiB")) as volume:
        write_dataset(volume, "n", files)
        with volume["n"] as dataset:
            export_dataset(dataset, base / "out", kind="folder")
            export_dataset(dataset, base / "out.tar", kind="tar")
        assert tree(base / "out") == files
        for number, source in enumerate([base / "out", base / "out.tar"]):
            import_dataset(volume, open_source(source), str(number), allow_empty=not files)
            assert read_dataset(volume, str(number)) == files
