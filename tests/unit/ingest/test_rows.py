"""Arrays as samples, in every format: written by the format's own library, read by ours."""

from __future__ import annotations

import io
import re
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dlfs.base.extras import install_command
from dlfs.errors import DeviceError, DlfsError, FormatError, LimitError, UsageError
from dlfs.ingest import records
from dlfs.ingest.arrays import rows
from dlfs.ingest.arrays.file import ArrayInfo
from dlfs.ingest.arrays.rows import ArraySource, windows
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.volume.volume import Volume
from tests.support.files import flip_bit
from tests.unit.ingest.array_writers import WRITERS, rows_of, take, take_all
from tests.unit.ingest.taking import import_by_command

IMAGES = np.arange(37 * 5 * 3, dtype=np.float32).reshape(37, 5, 3)
LABELS = np.arange(37, dtype=np.int64) % 10
ARRAYS = {"images": IMAGES, "labels": LABELS, "inner/pixels": IMAGES[:20].astype(np.uint8)}

every_format = pytest.mark.parametrize("kind", WRITERS)
quick_format = pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind != "adios2"])
"""Those that are quick to write and to open."""


def write(folder: Path, kind: str, arrays: Any, name: str = "data", **options: Any) -> Path:
    suffix, writer = WRITERS[kind]
    path = folder / (name + suffix)
    writer(path, arrays, **options)
    return path


def open_arrays(*paths: Path, buffer_bytes: int | None = None, **options: Any) -> ArraySource:
    source = open_source(paths, options=options)
    assert isinstance(source, ArraySource)
    if buffer_bytes is not None:
        source.buffer_bytes = buffer_bytes
    return source


# ---- what arrives --------------------------------------------------------------------------------


@quick_format
@pytest.mark.parametrize("buffer_bytes", [100, 1000, 1 << 20])
def test_rows_are_samples(tmp_path: Path, kind: str, buffer_bytes: int) -> None:
    source = open_arrays(write(tmp_path, kind, ARRAYS), buffer_bytes=buffer_bytes)
    expected = {k: v for name, values in ARRAYS.items() for k, v in rows_of(name, values).items()}
    got = take(source)
    assert got == expected
    assert list(got) == sorted(expected)
    assert source.sample_count == len(expected)
    assert source.sample_bytes == sum(map(len, expected.values()))
    assert dict(source.skipped) == {}


@quick_format
def test_whole_arrays_are_samples(tmp_path: Path, kind: str) -> None:
    source = open_arrays(write(tmp_path, kind, ARRAYS), samples="arrays", buffer_bytes=500)
    assert take(source) == {name: values.tobytes() for name, values in ARRAYS.items()}
    assert source.sample_count == len(ARRAYS)
    assert source.sample_bytes == sum(values.nbytes for values in ARRAYS.values())


@every_format
def test_groups_are_archives(tmp_path: Path, kind: str) -> None:
    source = open_arrays(write(tmp_path, kind, ARRAYS), samples="groups")
    got = take(source)
    assert list(got) == ["data", "inner"]
    assert source.sample_bytes == sum(map(len, got.values()))
    with np.load(io.BytesIO(got["data"])) as archive:
        assert {name: archive[name].tolist() for name in archive} == {
            name: ARRAYS[name].tolist() for name in ("images", "labels")
        }
    with np.load(io.BytesIO(got["inner"])) as archive:
        assert archive["pixels"].dtype == np.uint8
        assert np.array_equal(archive["pixels"], ARRAYS["inner/pixels"])


@quick_format
def test_selection_by_pattern(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind, ARRAYS)
    assert set(take(open_arrays(path, select="inner/*"))) == set(
        rows_of("inner/pixels", ARRAYS["inner/pixels"])
    )
    assert len(take(open_arrays(path, select="/images,lab*"))) == 74


@every_format
def test_another_array_gives_attributes(tmp_path: Path, kind: str) -> None:
    path = write(
        tmp_path, kind, {"images": IMAGES, "labels": LABELS, "fold": np.array(4, np.int16)}
    )
    source = open_arrays(path, select="images", attributes="label=/labels,fold", buffer_bytes=999)
    got = take_all(source)
    assert [attributes["label"] for _, _, attributes in got] == LABELS.tolist()
    assert {attributes["fold"] for _, _, attributes in got} == {4}
    assert {attributes["dlfs:dtype"] for _, _, attributes in got} == {"<f4"}
    assert {attributes["dlfs:shape"] for _, _, attributes in got} == {"5,3"}
    unselected = take(open_arrays(path, attributes="label=/labels,fold"))
    assert unselected == rows_of("images", IMAGES)


@pytest.mark.parametrize("kind", ["hdf5", "netcdf", "zarr", "zarr-2"])
def test_text_is_an_attribute_and_a_sample(tmp_path: Path, kind: str) -> None:
    names = np.array(["é", "", "three"], object)
    path = write(tmp_path, kind, {"x": IMAGES[:3], "name": names})
    got = take_all(open_arrays(path, attributes="name", buffer_bytes=70))
    assert [attributes["name"] for _, _, attributes in got] == names.tolist()
    source = open_arrays(path, select="name")
    assert (source.sample_count, source.sample_bytes) == (3, None)
    assert list(take(source).values()) == [text.encode() for text in names]
    assert [a["dlfs:shape"] for _, _, a in take_all(source)] == ["2", "0", "5"]


@quick_format
def test_several_files_put_their_names_before(tmp_path: Path, kind: str) -> None:
    paths = [
        write(tmp_path, kind, {"x": IMAGES + number, "y": LABELS.astype(dtype)}, name)
        for number, (name, dtype) in enumerate([("a", np.int16), ("b", np.float32)])
    ]
    source = open_arrays(*paths, attributes="y")
    expected = rows_of("a/x", IMAGES) | rows_of("b/x", IMAGES + 1)
    assert take(source) == expected
    shuffled = take(source, "shuffled", 3)
    assert shuffled == expected
    assert {a["y"].dtype for _, _, a in take_all(source)} == {np.dtype(np.float32)}
    assert not source.gives_shuffled


def test_windows_of_all_files_are_read_in_a_drawn_order(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.npy" for name in "abc"]
    for path in paths:
        np.save(path, IMAGES)

    def order(seed: int) -> list[str]:
        source = open_arrays(*paths, buffer_bytes=5 * IMAGES[0].nbytes)
        assert source.gives_runs
        return list(take(source, "shuffled", seed))

    found = order(1)
    assert found == order(1) != order(2)
    assert sorted(found) == list(take(open_arrays(*paths)))
    runs = [(path[0], int(path[-8:]) // 5) for path in found]
    assert len(list(groupby(runs))) == len(set(runs)) == 3 * 8
    assert len(list(groupby(file for file, _ in runs))) > 8


def test_a_file_without_rows_goes_with_others(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", IMAGES[:0])
    np.save(tmp_path / "b.npy", IMAGES)
    assert len(take(open_arrays(tmp_path / "a.npy", tmp_path / "b.npy"), "shuffled")) == 37


def test_of_many_files_the_windows_of_one_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "OPEN_FILES_MAX", 19)
    names = [f"f{number}" for number in range(20)]
    paths = [write(tmp_path, "npz", {"x": LABELS[:2], "y": LABELS[:2]}, name) for name in names]
    orders = [list(take(open_arrays(*paths), "shuffled", seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    files = [path.partition("/")[0] for path in orders[0]]
    assert files != sorted(files)
    assert len(list(groupby(files))) == 20
    monkeypatch.setattr(records, "PART_BYTES", 20)
    assert not open_arrays(*paths).gives_runs
    assert open_arrays(*paths, samples="groups").gives_runs  # one sample each


@every_format
@pytest.mark.parametrize("layout", ["path", "shuffled"])
def test_a_file_arrives_as_a_dataset(
    volume: Volume, tmp_path: Path, kind: str, layout: Any
) -> None:
    source = open_arrays(
        write(tmp_path, kind, {"images": IMAGES, "labels": LABELS}), attributes="label=labels"
    )
    report = import_dataset(volume, source, "n", layout=layout, seed=5)
    assert report.sample_count == 37
    with volume["n"] as dataset:
        assert [path.decode() for path in dataset.paths()] == list(rows_of("images", IMAGES))
        assert dataset.read(range(37)).to_list() == [row.tobytes() for row in IMAGES]
        arrays = dataset.read_arrays(range(37))
        assert arrays.dtype == IMAGES.dtype
        assert np.array_equal(arrays, IMAGES)
        assert np.array_equal(dataset.array(3), IMAGES[3])
        assert dataset.column("label").tolist() == LABELS.tolist()


@every_format
def test_the_command_imports(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind, ARRAYS)
    command = f"{path} V --option select=/images --option attributes=label=/labels"
    assert import_by_command(tmp_path, command) == rows_of("images", IMAGES)


# ---- any arrays ----------------------------------------------------------------------------------

DTYPES = st.sampled_from(["u1", "<i2", "<i4", "<i8", "<f4", "<f8", "<u2", "i1"])
SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=9)


@settings(max_examples=25)
@given(
    kind=st.sampled_from(["hdf5", "netcdf", "zarr", "zarr-2"]),
    values=st.tuples(DTYPES, SHAPES).flatmap(lambda pair: hnp.arrays(*pair)),
    sides=st.tuples(*[st.integers(1, 9)] * 3),
    buffer_bytes=st.integers(1, 600),
)
def test_any_array_in_any_chunks(
    kind: str, values: Any, sides: tuple[int, ...], buffer_bytes: int
) -> None:
    chunks = tuple(map(min, sides, values.shape))
    name = "chunksizes" if kind == "netcdf" else "chunks"
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), kind, {"x": values}, **{name: chunks})
        source = open_arrays(path, buffer_bytes=buffer_bytes)
        assert take(source) == rows_of("x", values)
        (array,) = (unit.members[0] for unit in source._units)
        assert array.chunk_rows == chunks[0] or kind == "netcdf"  # which may see no need of chunks
        assert take(open_arrays(path, samples="arrays")) == {"x": values.tobytes()}


@settings(max_examples=300)
@given(
    count=st.integers(0, 400),
    row_bytes=st.integers(0, 50),
    chunk_rows=st.integers(1, 400),
    buffer_bytes=st.integers(1, 2000),
)
def test_windows_end_where_chunks_end(
    count: int, row_bytes: int, chunk_rows: int, buffer_bytes: int
) -> None:
    array = ArrayInfo("x", np.dtype(np.uint8), (count, row_bytes), chunk_rows)
    got = list(windows(array, buffer_bytes))
    assert [row for first, size in got for row in range(first, first + size)] == list(range(count))
    for first, size in got:
        assert first % chunk_rows == 0
        assert size * row_bytes <= max(buffer_bytes, min(chunk_rows, count) * row_bytes)


def test_bands_that_are_too_large_are_cut() -> None:
    row_bytes = 1 << 20
    array = ArrayInfo("x", np.dtype(np.uint8), (1000, row_bytes), 500)
    assert list(windows(array, 4 * row_bytes))[:2] == [(0, 4), (4, 4)]
    assert list(windows(array, row_bytes // 2))[:2] == [(0, 1), (1, 1)]


# ---- what does not fit ---------------------------------------------------------------------------


@quick_format
def test_what_does_not_match_is_reported_with_what_there_is(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind, ARRAYS)
    with pytest.raises(UsageError, match=r"expected rain\* with rows, got .*images \(float32, 37x"):
        open_arrays(path, select="rain*")
    with pytest.raises(UsageError, match="expected an array '/y', got none"):
        open_arrays(path, attributes="label=/y")
    with pytest.raises(UsageError, match="37 samples, got inner/pixels"):
        open_arrays(path, select="images", attributes="label=/inner/pixels")
    with pytest.raises(UsageError, match="takes no option 'datasets'"):
        open_arrays(path, datasets="x")


@pytest.mark.parametrize("entry", ["=x", "label=", "", "x,x", "x=/a,x=/b"])
def test_attributes_are_named_once(tmp_path: Path, entry: str) -> None:
    with pytest.raises(UsageError, match=r"expected (an attribute NAME=ARRAY|each attribute once)"):
        open_arrays(write(tmp_path, "npz", {"x": LABELS}), attributes=entry)


def test_attributes_are_numbers_or_text(tmp_path: Path) -> None:
    path = write(tmp_path, "npz", {"x": LABELS, "y": LABELS.astype(np.complex64)})
    with pytest.raises(UsageError, match="to be of numbers or text, got y"):
        open_arrays(path, attributes="y")
    one = write(tmp_path, "npz", {"x": LABELS, "y": LABELS}, "one")
    two = write(tmp_path, "npz", {"x": LABELS, "y": LABELS.astype(str)}, "two")
    with pytest.raises(UsageError, match="attribute 'y' to be text or numbers, got both"):
        open_arrays(one, two, attributes="y")


def test_files_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    paths = [write(folder, "npz", {"x": LABELS}) for folder in (tmp_path, tmp_path / "inner")]
    with pytest.raises(UsageError, match=r"names of files that differ.* 'data' 2 times"):
        open_arrays(*paths)


def test_groups_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "GROUP_BYTES_MAX", 1000)
    with pytest.raises(LimitError, match="data: expected at most 1000 bytes in a group, got"):
        open_arrays(write(tmp_path, "npz", {"x": IMAGES}), samples="groups")


def test_a_file_that_changes_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "npz", {"x": IMAGES})
    source = open_arrays(path)
    write(tmp_path, "npz", {"x": IMAGES[:5]})
    with pytest.raises(DeviceError, match="x changed during the import"):
        take(source)
    source = open_arrays(path)
    blocks = source.blocks(layout="path", seed=0)
    write(tmp_path, "npz", {"x": IMAGES[:5] + 1}, compressed=True)
    with pytest.raises(DeviceError, match="the file changed during the import"):
        list(blocks)


def test_a_missing_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"hdf5": "x.h5", "netcdf": "x.nc", "zarr": "x.zarr.zip", "adios2": "x.bp"}
    modules = {"hdf5": "h5py", "netcdf": "netCDF4", "zarr": "zarr", "adios2": "adios2"}
    for kind, name in files.items():
        (tmp_path / name).touch()
        monkeypatch.setitem(__import__("sys").modules, modules[kind], None)
        with pytest.raises(UsageError, match=re.escape(install_command(kind))):
            open_arrays(tmp_path / name)


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hdf5", "netcdf", "netcdf-3", "npy", "npz"])
def test_truncated_files_are_reported(volume: Volume, tmp_path: Path, kind: str) -> None:
    values = np.random.default_rng(1).integers(0, 255, (50, 300), np.uint8)
    if kind == "npy":
        path = tmp_path / "data.npy"
        np.save(path, values)
    elif kind == "netcdf-3":
        path = write(tmp_path, "netcdf", {"x": values.view(np.int8)}, layout="NETCDF3_CLASSIC")
    else:
        path = write(tmp_path, kind, {"x": values})
    before = volume.free_bytes, volume.generation
    whole = path.read_bytes()
    for size in [*range(0, len(whole), max(1, len(whole) // 40)), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(DlfsError, match=path.name):
            import_dataset(volume, open_arrays(path), "n")
        assert (volume.free_bytes, volume.generation) == before


def test_a_damaged_chunk_is_reported_with_its_rows(volume: Volume, tmp_path: Path) -> None:
    values = np.random.default_rng(1).integers(0, 255, (50, 300), np.uint8)
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        x = file.create_dataset("g/x", data=values, chunks=(10, 300), fletcher32=True)
        place = x.id.get_chunk_info(3).byte_offset
    flip_bit(path, place + 50)
    source = open_arrays(path, buffer_bytes=4000)
    expected = r"data\.h5: g/x, rows 30\.\.39: expected a readable file"
    with pytest.raises(FormatError, match=expected):
        import_dataset(volume, source, "n", layout="path")
    assert volume.datasets() == []


@pytest.mark.parametrize("layout", [2, 3])
def test_a_damaged_chunk_of_zarr_is_reported(volume: Volume, tmp_path: Path, layout: int) -> None:
    values = np.random.default_rng(1).integers(0, 255, (50, 300), np.uint8)
    path = write(tmp_path, "zarr", {"x": values}, layout=layout, chunks=(10, 300))
    chunk = path / "x" / ("c/3/0" if layout == 3 else "3.0")
    whole = chunk.read_bytes()
    for content in (b"", whole[:8], whole[: len(whole) // 2], b"x" * len(whole)):
        chunk.write_bytes(content)
        with pytest.raises(FormatError, match=r"data\.zarr: x, rows 30\.\.39"):
            import_dataset(volume, open_arrays(path, buffer_bytes=4000), "n", layout="path")
    assert volume.datasets() == []


def test_a_damaged_member_is_reported(volume: Volume, tmp_path: Path) -> None:
    path = write(tmp_path, "npz", {"x": np.zeros((37, 1000))})
    flip_bit(path, path.stat().st_size // 2)
    with pytest.raises(FormatError, match=r"data\.npz: x, rows 0\.\.36: .*CRC"):
        import_dataset(volume, open_arrays(path), "n")
    assert volume.datasets() == []


def test_a_damaged_file_in_the_middle_leaves_the_volume(volume: Volume, tmp_path: Path) -> None:
    large = np.zeros((37, 1000))
    paths = [write(tmp_path, "npz", {"x": large}, f"f{number}") for number in range(5)]
    flip_bit(paths[2], paths[2].stat().st_size // 2)
    before = volume.free_bytes, volume.generation
    with pytest.raises(FormatError, match=r"f2\.npz: x"):
        import_dataset(volume, open_arrays(*paths), "n", layout="path")
    assert (volume.free_bytes, volume.generation) == before
    write(tmp_path, "npz", {"x": large}, "f2")
    import_dataset(volume, open_arrays(*paths), "n", layout="path")
    assert len(volume["n"]) == 5 * 37
