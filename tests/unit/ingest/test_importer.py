"""Sources run into volumes: what arrives, what is reported, and what an interruption leaves."""

from __future__ import annotations

import gzip
import re
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from dlfs.errors import (
    DeviceError,
    ExistsError,
    FormatError,
    LockedError,
    NotFoundError,
    SpaceError,
    UsageError,
)
from dlfs.ingest.attributes import AttributedSource, TableRule
from dlfs.ingest.formats.folder import FolderSource
from dlfs.ingest.formats.tar import TarSource
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.ingest.progress import Progress
from dlfs.ingest.registry import recognise
from dlfs.ingest.source import Layout
from dlfs.volume.volume import Volume
from tests.support.files import tar, write_files
from tests.unit.ingest.taking import contents

FILES = {f"d{i % 5}/{i:03d}\n": b"%d" % i * (i * 7) for i in range(150)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "folder", FILES)


@pytest.mark.parametrize("layout", ["path", "shuffled"])
def test_a_folder_arrives(volume: Volume, folder: Path, layout: Layout) -> None:
    (folder / "empty").mkdir()
    seen: list[Progress] = []
    source = FolderSource(folder)
    source.buffer_bytes = 5000
    report = import_dataset(volume, source, "n", layout=layout, seed=9, progress=seen.append)
    assert contents(volume, "n") == FILES
    assert (report.sample_count, report.sample_bytes) == (150, sum(map(len, FILES.values())))
    assert report.dataset.sample_count == 150
    assert report.dataset.layout == layout
    assert report.empty_directories == 1
    assert seen[0].samples_done == 0
    assert (seen[-1].samples_done, seen[-1].samples_total) == (150, 150)
    assert seen[-1].bytes_done == seen[-1].bytes_total


def test_layouts_decide_the_storage_order(volume: Volume, folder: Path) -> None:
    orders: dict[str, list[int]] = {}
    for name, layout, seed in [("p", "path", 0), ("s", "shuffled", 1), ("t", "shuffled", 2)]:
        import_dataset(volume, FolderSource(folder), name, layout=layout, seed=seed)
        with volume[name] as dataset, dataset.batches(1000, shuffle=None) as epoch:
            orders[name] = next(epoch).indices.tolist()
            for number in (0, 2**64 - 1):  # no epoch is as it is stored
                sequence = dataset.sequence(seed=seed, epoch=number)
                assert sequence.indices().tolist() != orders[name]
    assert orders["p"] == list(range(150))
    assert len({tuple(order) for order in orders.values()}) == 3


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_archives_arrive(volume: Volume, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    data = tar(*FILES.items())
    path.write_bytes(gzip.compress(data) if suffix == ".tar.gz" else data)
    report = import_dataset(volume, open_source(path), "n")
    assert contents(volume, "n") == FILES
    assert report.sample_count == 150


def test_an_empty_folder_makes_an_empty_dataset_where_it_is_asked_to(
    volume: Volume, tmp_path: Path
) -> None:
    report = import_dataset(volume, FolderSource(tmp_path), "n", allow_empty=True)
    assert report.sample_count == 0
    assert len(volume["n"]) == 0


def test_an_import_without_samples_is_an_error(volume: Volume, tmp_path: Path) -> None:
    before = volume.generation
    (tmp_path / "folder/x/y").mkdir(parents=True)
    (tmp_path / "folder/link").symlink_to("nowhere")
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    for source, found in (
        (FolderSource(tmp_path / "folder", links="skip"),
         "1 x symbolic link, 2 x directory without samples"),
        (FolderSource(tmp_path / "folder/x/y"), "nothing"),
        (open_source(tmp_path / "empty.tar"), "nothing"),
    ):  # fmt: skip
        message = f"import {source.name}: expected at least one sample, got none: it holds {found};"
        with pytest.raises(NotFoundError, match=re.escape(message)):
            import_dataset(volume, source, "n")
    volume.refresh()
    assert (volume.generation, "n" in volume) == (before, False)
    import_dataset(volume, open_source(tmp_path / "empty.tar"), "n", allow_empty=True)
    assert len(volume["n"]) == 0


def test_importing_again_makes_a_new_version(volume: Volume, folder: Path) -> None:
    versions = [import_dataset(volume, FolderSource(folder), "n").dataset.version for _ in range(2)]
    assert versions == [1, 2]


def test_a_source_that_fails_leaves_the_volume_as_it_was(volume: Volume, folder: Path) -> None:
    source = FolderSource(folder)
    source.buffer_bytes = 2000
    (folder / "d4" / "149\n").write_bytes(b"changed")
    free, generation = volume.free_bytes, volume.generation
    with pytest.raises(DeviceError, match="the file changed"):
        import_dataset(volume, source, "n", layout="path")
    assert (volume.free_bytes, volume.generation) == (free, generation)
    assert volume.datasets() == []


def test_ctrl_c_leaves_the_volume_as_it_was(volume: Volume, folder: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.samples_done > 0:
            raise KeyboardInterrupt

    free = volume.free_bytes
    source = FolderSource(folder)
    source.buffer_bytes = 2000
    with pytest.raises(KeyboardInterrupt):
        import_dataset(volume, source, "n", progress=interrupt)
    assert volume.free_bytes == free
    import_dataset(volume, FolderSource(folder), "n")
    assert contents(volume, "n") == FILES


def test_space_is_checked_before_anything_is_read(volume: Volume, tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as out:
        out.truncate(1 << 30)
    seen: list[Progress] = []
    with pytest.raises(SpaceError):
        import_dataset(volume, FolderSource(tmp_path), "n", progress=seen.append)
    assert all(progress.samples_done == 0 for progress in seen)


def test_a_second_writer_is_reported(volume: Volume, folder: Path) -> None:
    with volume.writer("other") as writer, pytest.raises(LockedError):
        import_dataset(volume, FolderSource(folder), "n")
    writer.abort()


def test_a_path_that_is_a_folder_too_is_an_error(volume: Volume, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar(("a", b""), ("a/b", b"")))
    with pytest.raises(ExistsError):
        import_dataset(volume, open_source(tmp_path / "a.tar"), "n")
    assert volume.datasets() == []


def test_the_kind_of_source_is_found_by_the_path(folder: Path, tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"s-{i}.tar").write_bytes(tar((f"{i}", b"")))
    assert isinstance(open_source(folder), FolderSource)
    assert recognise([str(tmp_path / "s-0.tar")]).name == "tar"
    for pattern in ("s-{0..2}.tar", "s-*.tar"):
        assert open_source(f"{tmp_path}/{pattern}").sample_count == 3
    two = open_source([tmp_path / "s-0.tar", tmp_path / "s-2.tar"], options={"prefix_shards": True})
    assert two.sample_count == 2


def test_what_is_no_source_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.unknown").touch()
    with pytest.raises(NotFoundError, match="no such file or folder"):
        open_source(tmp_path / "nothing.tar")
    with pytest.raises(UsageError, match="expected a folder, or a file of a known format"):
        open_source(tmp_path / "a.unknown")
    with pytest.raises(UsageError, match="expected a folder, or a file of a known format"):
        open_source([tmp_path / "a.unknown", tmp_path / "a.unknown"])
    (tmp_path / "a.csv").touch()
    with pytest.raises(UsageError, match="folder, got list; --format folder makes each file a"):
        open_source([folder, tmp_path / "a.csv"])


def test_progress_knows_its_rate() -> None:
    progress = Progress(1, 4, 100, 400, 2.0)
    assert (progress.bytes_per_second, progress.seconds_left) == (50.0, 6.0)
    assert Progress(1, None, 100, None, 2.0).seconds_left is None
    assert Progress(0, 4, 0, 400, 0.0).seconds_left is None


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_a_source_that_grew_is_appended(volume: Volume, folder: Path, kind: str) -> None:
    def source() -> FolderSource | TarSource:
        if kind == "folder":
            return FolderSource(folder)
        with tarfile.open(folder.parent / "all.tar", "w") as archive:
            archive.add(folder, ".")
        return TarSource([str(folder.parent / "all.tar")])

    with closing(source()) as first:
        import_dataset(volume, first, "a")
    (folder / "d0" / "new").write_bytes(b"new")
    (folder / "d1" / "000").write_bytes(b"other")
    with closing(source()) as grown, pytest.raises(ExistsError):
        import_dataset(volume, grown, "a", append=True)
    with closing(source()) as grown:
        report = import_dataset(volume, grown, "a", append=True, skip_existing=True)
    assert (report.sample_count, report.sample_bytes) == (2, 8)
    assert report.skipped["sample that the dataset has already"] == len(FILES)
    assert (report.dataset.version, report.dataset.sample_count) == (2, len(FILES) + 2)
    with volume["a"] as dataset:
        assert dataset.get("d0/new") == b"new"
        assert dataset.get("d1/000") == b"other"
        assert all(dataset.get(path) == data for path, data in FILES.items())
    free = volume.free_bytes
    with closing(source()) as same:
        report = import_dataset(volume, same, "a", append=True, skip_existing=True)
    assert (report.sample_count, report.dataset.version) == (0, 2)
    assert ([info.version for info in volume.versions("a")], volume.free_bytes) == ([1, 2], free)


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_rules_see_no_samples_that_the_dataset_has(
    volume: Volume, folder: Path, kind: str, tmp_path: Path
) -> None:
    def source(rows: str) -> AttributedSource:
        (tmp_path / "rows.csv").write_text("path,number\n" + rows)
        rules = [TableRule(str(tmp_path / "rows.csv"))]
        if kind == "folder":
            return AttributedSource(FolderSource(folder), rules)
        files = [(path.name, path.read_bytes()) for path in folder.iterdir()]
        (tmp_path / "all.tar").write_bytes(tar(*files))
        return AttributedSource(TarSource([str(tmp_path / "all.tar")]), rules)

    folder = write_files(tmp_path / "few", {"a": b"a"})
    with closing(source("a,1\n")) as first:
        import_dataset(volume, first, "n", layout="path")
    (folder / "b").write_bytes(b"b")
    with closing(source("b,2\n")) as grown:
        report = import_dataset(volume, grown, "n", append=True, skip_existing=True)
    assert report.skipped == {"sample that the dataset has already": 1}
    assert (report.sample_count, report.dataset.layout) == (1, "path")
    with volume["n"] as dataset:
        assert dataset.column("number").tolist() == [1, 2]


def test_files_that_the_dataset_has_are_not_read(volume: Volume, folder: Path) -> None:
    with closing(FolderSource(folder)) as source:
        import_dataset(volume, source, "a")
    with closing(FolderSource(folder)) as source:
        for name in FILES:
            (folder / name).write_bytes(b"changed after the source was opened")
        (folder / "late").write_bytes(b"not in the source")
        import_dataset(volume, source, "a", append=True, skip_existing=True)


def test_there_must_be_a_dataset_to_append_to(volume: Volume, folder: Path) -> None:
    with closing(FolderSource(folder)) as source:
        with pytest.raises(NotFoundError, match="'a'"):
            import_dataset(volume, source, "a", append=True)
        with pytest.raises(UsageError, match="skip_existing only with append"):
            import_dataset(volume, source, "a", skip_existing=True)


def test_a_path_twice_in_the_appended_source_is_an_error(volume: Volume, folder: Path) -> None:
    with closing(FolderSource(folder)) as source:
        import_dataset(volume, source, "a")
    shards = []
    for number in range(2):
        shards.append(str(folder.parent / f"{number}.tar"))
        with tarfile.open(shards[-1], "w") as archive:
            archive.add(folder / "d0" / "000\n", "twice.x")
    with (
        closing(open_source(shards, format_name="webdataset")) as source,
        pytest.raises((ExistsError, FormatError)),
    ):
        import_dataset(volume, source, "a", append=True, skip_existing=True)


def test_classes_that_are_appended_have_the_labels_they_had(volume: Volume, tmp_path: Path) -> None:
    def add(root: str, name: str) -> Path:
        return write_files(tmp_path / root, {name: name.encode()})

    def append(root: Path) -> None:
        with closing(open_source(root, format_name="imagefolder")) as source:
            import_dataset(volume, source, "a", append="a" in volume, skip_existing="a" in volume)

    append(add("all", "cat/1"))
    append(add("all", "dog/1"))
    with pytest.raises(UsageError, match="0 for class 'dog'; there it is 1, and 0 is 'cat'"):
        append(add("dogs", "dog/2"))
    grown = add("all", "cow/1")
    with pytest.raises(UsageError, match="got 1 for class 'cow'"):
        append(grown)
    attributes = volume["a"].attributes
    assert attributes.column("label").tolist() == [0, 1]


def test_a_uuid_is_given_once(volume: Volume) -> None:
    with volume.writer("a") as writer:
        writer.add("x", b"x")
    uuid = volume["a"].uuid
    for write in (volume.writer, volume.append):
        with pytest.raises(ExistsError, match=str(uuid)):
            write("a", uuid=uuid)
