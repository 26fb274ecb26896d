"""Tests of single array formats: kinds of values, layouts, damage."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlfs.errors import DlfsError, FormatError, TruncatedError, UsageError
from dlfs.ingest.arrays.rows import ArraySource
from dlfs.ingest.importer import open_source
from dlfs.ingest.isolation import source as isolation
from tests.support.files import flip_bit, write_at
from tests.unit.ingest.array_writers import (
    rows_of,
    take,
    take_all,
    write_adios,
    write_hdf5,
    write_netcdf,
    write_npz,
    write_zarr,
)

VALUES = np.arange(60 * 7, dtype=np.float32).reshape(60, 7)


def open_arrays(path: Path, **options: Any) -> ArraySource:
    source = open_source(path, options=options)
    assert isinstance(source, ArraySource)
    return source


# ---- HDF5 ----------------------------------------------------------------------------------------


@pytest.fixture
def hdf5(tmp_path: Path) -> Any:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        yield file


def finished(file: Any) -> Path:
    path = Path(file.filename)
    file.close()
    return path


def test_hdf5_vectors_of_any_length_are_rows(hdf5: Any) -> None:
    import h5py

    images = [os.urandom(size) for size in [5, 0, 3000, *range(200)]]
    for name, kind in (("jpeg", np.uint8), ("curve", np.float32)):
        vectors = hdf5.create_dataset(name, (len(images),), dtype=h5py.vlen_dtype(kind))
        for row, image in enumerate(images):
            vectors[row] = np.frombuffer(image, np.uint8).astype(kind)
    got = take_all(open_arrays(finished(hdf5)))
    assert [data for path, data, _ in got if path.startswith("jpeg")] == images
    curves = [data for path, data, _ in got if path.startswith("curve")]
    assert [np.frombuffer(data, np.float32).astype(np.uint8).tobytes() for data in curves] == images


def test_hdf5_values_that_are_no_plain_numbers(hdf5: Any) -> None:
    import h5py

    pair = np.array([(1, 2.5), (3, 4.5)], [("a", ">i2"), ("b", "<f8")])
    hdf5["pair"] = pair
    hdf5["flag"] = flag = np.array([[True, False], [False, True]])
    hdf5["wave"] = wave = np.array([1 + 2j, 3j])
    hdf5["text"] = text = np.array([b"ab", b"c"], "S3")
    hdf5["big"] = big = np.array([1, 2], ">u4")
    hdf5["nothing"] = h5py.Empty("f4")
    hdf5["pointer"] = np.array([hdf5["big"].ref], h5py.ref_dtype)
    hdf5["soft"] = h5py.SoftLink("/big")
    hdf5["away"] = h5py.ExternalLink("other.h5", "/x")
    hdf5["again/big"] = hdf5["big"]
    hdf5["one"] = 5
    path = finished(hdf5)
    for options in ({"select": "pair"}, {"fields": "a=pair/a,b=pair/b"}):
        blocks = [*open_arrays(path, **options).blocks(layout="path", seed=0)]
        assert blocks[0].paths[0].endswith(b"00000000")
        assert set(blocks[0].attributes["dlfs:fields"]) == {'{"a":">i2[]","b":"<f8[]"}'}
    source = open_arrays(path)
    assert take(source) == (
        rows_of("again/big", big)
        | rows_of("flag", flag)
        | rows_of("pair", pair)
        | rows_of("text", text)
        | rows_of("wave", wave)
    )
    forms = {path: a["dlfs:dtype"] for path, _, a in take_all(source)}
    assert forms["pair/00000000"] == ""
    assert forms["wave/00000001"] == "<c16"
    assert source.skipped == {
        "soft link soft to /big": 1,
        "external link away to /x of other.h5": 1,
        "type and shape of pair ([('a', '>i2'), ('b', '<f8')], 2), which samples do not record": 1,
        "array of values without bytes": 2,
        "array without rows": 1,
    }


def test_hdf5_is_recognised_by_what_is_in_it(hdf5: Any, tmp_path: Path) -> None:
    hdf5["x"] = VALUES
    path = finished(hdf5).rename(tmp_path / "model")
    assert take(open_arrays(path)) == rows_of("x", VALUES)


def test_hdf5_compressed_and_partly_written(hdf5: Any) -> None:
    x = hdf5.create_dataset("x", (60, 7), "f4", chunks=(8, 2), compression="gzip", fillvalue=7)
    x[:30] = VALUES[:30]
    assert take(open_arrays(finished(hdf5), missing="fill")) == rows_of(
        "x", np.concatenate([VALUES[:30], np.full((30, 7), 7, np.float32)])
    )


@pytest.mark.parametrize(("code", "match"), [(40002, "Zstandard; pip"), (40001, "set HDF5")])
def test_hdf5_filters_that_are_not_installed(
    hdf5: Any, code: int, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import h5py

    monkeypatch.setattr("dlfs.ingest.formats.hdf5.parts.FILTERS", {40002: "Zstandard"})
    monkeypatch.delenv("HDF5_PLUGIN_PATH", raising=False)  # netCDF4 sets it to filters of its own
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_chunk((10, 7))
    layout.set_filter(code, h5py.h5z.FLAG_OPTIONAL, ())
    space, kind = h5py.h5s.create_simple((60, 7)), h5py.h5t.IEEE_F32LE
    dataset = h5py.Dataset(h5py.h5d.create(hdf5.id, b"x", kind, space, layout))
    dataset[...] = VALUES  # without the filter, as it is optional
    dataset.id.write_direct_chunk((20, 0), b"packed")
    hdf5["y"] = VALUES
    path = finished(hdf5)
    with pytest.raises(FormatError, match=rf"x: expected the HDF5 filter {code} \(.*{match}"):
        open_arrays(path)
    assert take(open_arrays(path, select="y")) == rows_of("y", VALUES)
    with h5py.File(path, "r+") as file:
        file["x"].id.write_direct_chunk((20, 0), VALUES[20:30].tobytes(), filter_mask=1)
    assert take(open_arrays(path, select="x")) == rows_of("x", VALUES)


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 1)])
def test_strings_of_any_length_in_two_dimensions_are_left_out(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    values = np.array(["1", "22", "\xe9", ""], object).reshape(shape)
    for name, write in (("a.h5", write_hdf5), ("a.nc", write_netcdf), ("a.zarr", write_zarr)):
        write(tmp_path / name, {"text": values, "x": VALUES})
        source = open_arrays(tmp_path / name)
        assert take(source) == rows_of("x", VALUES)
        assert source.skipped == {"array of values without bytes": 1}
        with pytest.raises(UsageError, match=r"got text \(other, 2x2"):
            open_arrays(tmp_path / name, select="text")


@pytest.mark.isolated
def test_hdf5_lengths_of_two_gib_are_refused(hdf5: Any) -> None:
    import h5py

    vectors = hdf5.create_dataset("x", (4,), dtype=h5py.vlen_dtype(np.uint8))
    for row in range(4):
        vectors[row] = np.arange(7, dtype=np.uint8)
    at = vectors.id.get_offset() + 16  # the second vector: its length, and where it is
    path = finished(hdf5)
    assert path.read_bytes()[at : at + 4] == b"\7\0\0\0"
    flip_bit(path, at + 3, 7)
    source = open_source(path)
    with pytest.raises(DlfsError, match=r"data\.h5: x, rows 0\.\.3: .*(memory|heap object)"):
        take(source)  # type: ignore[arg-type]
    source.close()


# ---- NetCDF --------------------------------------------------------------------------------------

CLASSIC = ["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA"]


@pytest.mark.parametrize("records", [None, 9])
@pytest.mark.parametrize("layout", CLASSIC)
def test_netcdf_classic_files_that_end_early(tmp_path: Path, layout: str, records: Any) -> None:
    netcdf = pytest.importorskip("netCDF4")
    path = tmp_path / "data.nc"
    arrays = {
        "a": VALUES[:9].astype(np.int16),
        "b": VALUES[:9, :3].astype(np.int8),
        "c": VALUES[:9, 0],
    }
    with netcdf.Dataset(path, "w", format=layout) as file:
        file.title, file.weights = "some text", np.arange(5, dtype=np.float64)
        file.createDimension("n", records)
        for name, values in arrays.items():
            if values.ndim > 1:
                file.createDimension(f"{name}_k", values.shape[1])
            variable = file.createVariable(name, values.dtype, ("n", f"{name}_k")[: values.ndim])
            variable.units = "m"
            variable[:] = values
    whole = path.read_bytes()
    assert take(open_arrays(path)) == {
        sample: data for name in arrays for sample, data in rows_of(name, arrays[name]).items()
    }
    for size in range(4, len(whole) - 4):
        path.write_bytes(whole[:size])
        with pytest.raises(TruncatedError, match=r"data\.nc: expected \d+ bytes"):
            open_arrays(path)


def test_netcdf_headers_that_make_no_sense(tmp_path: Path) -> None:
    path = tmp_path / "data.nc"
    write_netcdf(path, {"x": VALUES}, layout="NETCDF3_CLASSIC")
    whole = path.read_bytes()
    assert whole[8:12] == bytes([0, 0, 0, 10])
    for place, got in ((11, "the tag"), (12, "entries"), (whole.index(b"\0\0\0\5"), "a type")):
        path.write_bytes(whole)
        flip_bit(path, place, 6)
        with pytest.raises(DlfsError, match=rf"data\.nc: .*({got}|bytes)"):
            open_arrays(path)


def test_netcdf_values_are_as_they_are_stored(tmp_path: Path) -> None:
    netcdf = pytest.importorskip("netCDF4")
    path = tmp_path / "data.nc"
    stored = np.array([[0, 1, -999], [3, 4, 5]], np.int16)
    with netcdf.Dataset(path, "w") as file:
        file.createDimension("n", None)
        file.createDimension("k", 3)
        group = file.createGroup("deep").createGroup("er")
        variable = group.createVariable("x", "i2", ("n", "k"), fill_value=-999, zlib=True)
        variable.scale_factor, variable.add_offset = 0.5, 100.0
        variable.set_auto_maskandscale(False)
        variable[:] = stored
        vectors = file.createVariable("v", file.createVLType(np.int32, "vector"), ("n",))
        vectors[0], vectors[1] = np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)
        file.createVariable("one", "f8", ())[...] = 2.5
        colours = file.createEnumType(np.uint8, "hue", {"red": 1, "blue": 2})
        file.createVariable("colour", colours, ("n",))[:] = np.array([1, 2], np.uint8)
    source = open_arrays(path)
    assert take(source) == (
        rows_of("colour", np.array([1, 2], np.uint8))
        | rows_of("deep/er/x", stored)
        | {f"v/{row:08d}": np.arange(3 - row, dtype=np.int32).tobytes() for row in range(2)}
    )
    packing = "deep/er/x (int16, 2x3) by scale_factor='0.5', add_offset='100.0'"
    said = f"packing of {packing}, whose samples have the numbers as stored"
    assert source.skipped == {"array without rows": 1, said: 1}


# ---- Zarr ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["netcdf", "hdf5", "zarr"])
def test_packing_that_is_not_applied_is_said(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    stored = np.arange(6, dtype="i2")
    packings = {"t": (0.5, 20), "plain": (1.0, 0)}
    if kind == "netcdf":
        with pytest.importorskip("netCDF4").Dataset(path, "w") as file:
            file.createDimension("x", 6)
            for name, (scale, offset) in packings.items():
                made = file.createVariable(name, "i2", ("x",))
                made.set_auto_maskandscale(False)
                made.scale_factor, made.add_offset = scale, offset
                made[:] = stored
    else:
        {"hdf5": write_hdf5, "zarr": write_zarr}[kind](path, dict.fromkeys(packings, stored))
        package = pytest.importorskip({"hdf5": "h5py", "zarr": "zarr"}[kind])
        opened = package.File(path, "a") if kind == "hdf5" else package.open_group(path)
        for name, (scale, offset) in packings.items():
            opened[name].attrs.update({"scale_factor": scale, "add_offset": offset})
        if kind == "hdf5":
            opened.close()
    source = open_arrays(path)
    (said,) = source.skipped
    assert said.startswith("packing of t (int16, 6) by scale_factor='0.5', add_offset='20', ")
    assert take(source) == rows_of("t", stored) | rows_of("plain", stored)


def test_zarr_array_that_is_the_store(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    for layout, order in ((2, {"order": "F"}), (3, {})):
        path = tmp_path / f"only{layout}.zarr"
        options = {"shape": VALUES.shape, "chunks": (7, 7), "dtype": "f4", **order}
        zarr.create_array(path, zarr_format=layout, **options)[...] = VALUES
        assert take(open_arrays(path)) == rows_of(f"only{layout}", VALUES)


def test_zarr_shards_and_chunks_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "data.zarr"
    write_zarr(path, {"x": VALUES}, chunks=(5, 7), shards=(20, 7), fill_value=3)
    assert take(open_arrays(path)) == rows_of("x", VALUES)
    (path / "x/c/1/0").unlink()
    left = VALUES.copy()
    left[20:40] = 3
    assert take(open_arrays(path, missing="fill")) == rows_of("x", left)


def test_zarr_in_a_zip_archive(tmp_path: Path) -> None:
    write_zarr(tmp_path / "data.zarr", {"x": VALUES}, chunks=(9, 7))
    archive = shutil.make_archive(str(tmp_path / "data.zarr"), "zip", tmp_path / "data.zarr")
    assert take(open_arrays(Path(archive))) == rows_of("x", VALUES)


@pytest.mark.parametrize("layout", [2, 3])
def test_zarr_chunks_of_blosc_that_end_early(tmp_path: Path, layout: int) -> None:
    pytest.importorskip("zarr")
    from numcodecs import Blosc
    from zarr.codecs import BloscCodec

    values = np.frombuffer(np.random.default_rng(1).bytes(6000), np.uint8).reshape(60, 100)
    codec = Blosc() if layout == 2 else BloscCodec()
    path = tmp_path / "data.zarr"
    write_zarr(path, {"g/x": values}, layout=layout, chunks=(10, 100), compressors=codec)
    assert take(open_arrays(path)) == rows_of("g/x", values)
    chunk = path / "g/x" / ("c/3/0" if layout == 3 else "3.0")
    whole = chunk.read_bytes()
    for size in range(0, len(whole), 50):
        chunk.write_bytes(whole[:size])
        with pytest.raises(TruncatedError, match=rf"g/x, rows 0\.\.59: .* in g/x/.*: {size} bytes"):
            take(open_arrays(path))


@pytest.mark.parametrize("content", [b"", b"{", b'{"zarr_format": 9}', b"\xff"])
@pytest.mark.parametrize("name", ["zarr.json", "x/zarr.json"])
def test_zarr_descriptions_that_make_no_sense(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / "data.zarr"
    write_zarr(path, {"x": VALUES})
    (path / name).write_bytes(content)
    with pytest.raises(DlfsError, match=r"data\.zarr"):
        open_arrays(path)


# ---- ADIOS2 --------------------------------------------------------------------------------------


def test_adios_steps_are_rows(tmp_path: Path) -> None:
    path = tmp_path / "data.bp"
    fields = np.arange(5 * 4 * 6, dtype=np.float64).reshape(5, 4, 6)
    times = np.arange(5, dtype=np.int32)
    waves = fields[:, 0].astype(np.complex64)
    names = np.array([f"step {step}" for step in range(5)], object)
    arrays = {"field": fields, "inner/time": times, "name": names, "wave": waves}
    write_adios(path, arrays, steps=5)
    got = take_all(open_arrays(path, select="field,wave", attributes="t=/inner/time,name=/name"))
    expected = rows_of("field", fields) | rows_of("wave", waves)
    assert {name: data for name, data, _ in got} == expected
    assert [attributes["t"] for _, _, attributes in got] == [*times.tolist()] * 2
    assert [attributes["name"] for _, _, attributes in got] == [*names.tolist()] * 2


def test_adios_leaves_out_what_has_no_shape(tmp_path: Path) -> None:
    adios = pytest.importorskip("adios2", exc_type=ImportError)
    path = tmp_path / "data.bp"
    with adios.Stream(str(path), "w") as stream:
        for step in range(2):
            stream.begin_step()
            stream.write("x", VALUES, VALUES.shape, [0, 0], VALUES.shape)
            stream.write("local", VALUES, [], [], VALUES.shape)
            part = VALUES[: 3 + step].copy()
            stream.write("grows", part, part.shape, [0, 0], part.shape)
            stream.end_step()
    source = open_arrays(path)
    assert take(source) == rows_of("x", np.stack([VALUES, VALUES]))
    assert source.skipped == {"local array": 1, "array whose shape changes": 1}


@pytest.mark.isolated
@pytest.mark.parametrize("name", ["md.idx", "md.0", "data.0"])
def test_adios_files_that_end_early(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "ANSWER_SECONDS", 1)
    path = tmp_path / "data.bp"
    write_adios(path, {"x": np.random.default_rng(1).random((3, 50, 70))}, steps=3)
    whole = (path / name).read_bytes()
    for size in (0, len(whole) // 2):
        (path / name).write_bytes(whole[:size])
        with pytest.raises(DlfsError, match=r"data\.bp"):
            take(open_source(path))


# ---- NumPy ---------------------------------------------------------------------------------------


def test_npy_takes_the_name_of_its_file_and_attributes_beside_it(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", VALUES)
    np.save(tmp_path / "labels.npy", np.arange(60, dtype=np.uint8))
    np.save(tmp_path / "names.npy", np.array([f"n{row}" for row in range(60)]))
    far = tmp_path / "labels.npy"
    options = {"attributes": f"label=labels.npy,name=names.npy,far={far}"}
    got = take_all(open_arrays(tmp_path / "images.npy", **options))
    assert {path: data for path, data, _ in got} == rows_of("images", VALUES)
    assert [a["label"] for _, _, a in got] == [a["far"] for _, _, a in got] == list(range(60))
    assert [a["name"] for _, _, a in got] == [f"n{row}" for row in range(60)]
    with pytest.raises(UsageError, match=r"expected an array 'other\.npy', got none"):
        open_arrays(tmp_path / "images.npy", attributes="other.npy")


class Explodes:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EXPLODED"],)


def test_objects_are_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPLODED", str(tmp_path / "exploded"))
    objects = np.array([Explodes(), 1], object)
    np.save(tmp_path / "x.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "x.npz", x=objects, y=VALUES)
    with pytest.raises(UsageError, match=r"expected arrays with rows, got an array .other, 2"):
        open_arrays(tmp_path / "x.npy")
    source = open_arrays(tmp_path / "x.npz")
    assert take(source) == rows_of("y", VALUES)
    assert source.skipped == {"array of values without bytes": 1}
    assert not (tmp_path / "exploded").exists()
    assert pickle.dumps(objects)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_npy_versions(tmp_path: Path, version: tuple[int, int]) -> None:
    with open(tmp_path / "x.npy", "wb") as file:
        np.lib.format.write_array(file, VALUES, version=version)
    assert take(open_arrays(tmp_path / "x.npy")) == rows_of("x", VALUES)
    write_at(tmp_path / "x.npy", 6, b"\x09")
    with pytest.raises(FormatError, match=r"x\.npy: expected a readable file"):
        open_arrays(tmp_path / "x.npy")


def test_npy_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, VALUES)
    source = open_arrays(path)
    source.buffer_bytes = 500
    blocks = source.blocks(layout="path", seed=0)
    next(blocks)
    os.truncate(path, 1000)
    with pytest.raises(TruncatedError, match=r"x\.npy, rows \d+\.\.\d+: .* more bytes at byte"):
        list(blocks)


def test_npz_members(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    write_npz(path, {"x": VALUES, "one": np.array(5)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("readme.txt", "hello")
    source = open_arrays(path)
    assert take(source) == rows_of("x", VALUES)
    assert source.skipped == {"member that is no array": 1, "array without rows": 1}
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x.npy", archive.read("x.npy"))
    with pytest.raises(FormatError, match=r"x\.npz: expected each member once, got 'x' twice"):
        open_arrays(path)


def test_npz_members_of_another_size(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.save(tmp_path / "x.npy", VALUES)
    data = (tmp_path / "x.npy").read_bytes()
    for name in ("../x.npy", "/x.npy"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, data)
        with pytest.raises(FormatError, match=r"x\.npz: expected a (name without|relative name)"):
            open_arrays(path)
    for content, got in ((data[:-1], 1679), (data + b"x", 1681)):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", content)
        with pytest.raises(FormatError, match=rf"x\.npz: x: expected 1680 bytes, got {got}"):
            open_arrays(path)
