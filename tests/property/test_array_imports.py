"""Compares the import of every array format with what the format's own reader gives.

Hypothesis draws arrays (types, shapes, extremes, chunks, filters, names in groups) and options
(samples, fields, size of buffers). A file is written by the format's library, read by it, and read
by ``open_source``: the bytes, the types and the shapes must be equal, or the import is refused with
an error that names file and array. The same files are then damaged: cut, flipped, overwritten,
and chunks removed. A damaged file may give an error that names it, or values; its process may not
crash or hang, and never are there samples from other memory: two reads are equal.

``DLFS_TEST_EXAMPLES`` is the number of examples of each test, 15 by default; a run prints what
repeats it.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dlfs.errors import DlfsError
from dlfs.fields.arrays import ArrayForm
from dlfs.ingest.importer import open_source
from dlfs.ingest.registry import make_options, recognise
from dlfs.ingest.source import Source

EXAMPLES = int(os.environ.get("DLFS_TEST_EXAMPLES", "15"))
Arrays = Mapping[str, npt.NDArray[Any]]

few = settings(
    max_examples=EXAMPLES,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


# ---- values --------------------------------------------------------------------------------------

NUMBERS = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f4", "<f8")
OTHERS = ("<f2", ">i2", ">u4", ">f8", "<c8", "<c16")
TYPES = {
    "hdf5": (*NUMBERS, *OTHERS, "|S1", "|S5"),
    "netcdf": tuple(kind for kind in NUMBERS if kind != "|b1"),
    "zarr-2": (*NUMBERS, *OTHERS, "|S5", "<U3", "<M8[s]"),
    "zarr-3": (*NUMBERS, "<f2", "<c8", "<c16"),
    "npy": (*NUMBERS, *OTHERS, "|S5", "<U3", "<M8[us]", "<m8[D]"),
    "npz": (*NUMBERS, *OTHERS, "|S5", "<U3", "<M8[us]", "<m8[D]"),
    "adios2": tuple(kind for kind in NUMBERS if kind != "|b1"),  # its reader takes no complex
}
"""Types of the elements that each format has."""

SIDES = {"adios2": 1, "netcdf": 1}
"""Shortest side of an array; 0 unless the format has no such arrays."""


@st.composite
def arrays(draw: st.DrawFn, kind: str, rows: int | None = None) -> npt.NDArray[Any]:
    """An array of a type of the format, with one to three dimensions, and extremes."""
    dtype = np.dtype(draw(st.sampled_from(TYPES[kind])))
    least = SIDES.get(kind, 0)
    inner = draw(st.lists(st.integers(least, 4), max_size=2))
    first = draw(st.integers(max(1, least), 9)) if rows is None else rows
    return draw(hnp.arrays(dtype, (first, *inner)))


@st.composite
def files(draw: st.DrawFn, kind: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a file by name, in groups where the format has groups."""
    names = ["x", "y"] if kind in ("npy", "npz", "adios2") else ["x", "g/y", "g/h/z"]
    chosen = names[:1] if kind == "npy" else names[: draw(st.integers(1, len(names)))]
    return {name: draw(arrays(kind)) for name in chosen}


# ---- writers and own readers ---------------------------------------------------------------------


def chunks_of(values: npt.NDArray[Any], side: int) -> tuple[int, ...]:
    return tuple(max(1, min(length, side)) for length in values.shape)


def hdf5(path: Path, written: Arrays, side: int, packed: bool) -> Arrays:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, values in written.items():
            filters = {"compression": "gzip", "shuffle": True, "fletcher32": side % 2 == 0}
            options = {"chunks": chunks_of(values, side), **(filters if packed else {})}
            file.create_dataset(name, data=values, **(options if values.size else {}))
    with h5py.File(path) as file:
        return {name: file[name][...] for name in written}


def netcdf(path: Path, written: Arrays, side: int, packed: bool) -> Arrays:
    netcdf4 = pytest.importorskip("netCDF4")
    with netcdf4.Dataset(path, "w") as file:
        for name, values in written.items():
            axes = [f"{name.replace('/', '_')}{axis}" for axis in range(values.ndim)]
            for axis, length in zip(axes, values.shape, strict=True):
                file.createDimension(axis, length)
            options = {"chunksizes": chunks_of(values, side), "zlib": packed}
            made = file.createVariable(name, values.dtype, axes, **options)
            made.set_auto_maskandscale(False)
            made[...] = values
    with netcdf4.Dataset(path) as file:
        file.set_auto_maskandscale(False)
        return {name: np.asarray(file[name][...]) for name in written}


def zarr(path: Path, written: Arrays, side: int, packed: bool, layout: int) -> Arrays:
    package = pytest.importorskip("zarr")
    root = package.open_group(path, mode="w", zarr_format=layout)
    for name, values in written.items():
        chunks = chunks_of(values, side)
        options: dict[str, Any] = {"chunks": chunks}
        if layout == 3 and side % 2 == 0:
            options["shards"] = tuple(2 * length for length in chunks)
        if not packed:
            options["compressors"] = None
        made = root.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            config={"write_empty_chunks": True},
            **options,
        )
        made[...] = values
    root = package.open_group(path, mode="r")
    return {name: np.asarray(root[name][...]) for name in written}


def zarr_2(path: Path, written: Arrays, side: int, packed: bool) -> Arrays:
    return zarr(path, written, side, packed, 2)


def zarr_3(path: Path, written: Arrays, side: int, packed: bool) -> Arrays:
    return zarr(path, written, side, packed, 3)


def npy(path: Path, written: Arrays, side: int, packed: bool) -> Arrays:
    (values,) = written.values()
    np.save(path, np.asfortranarray(values) if packed else values)
    return {"": np.load(path)}


def npz(path: Path, written: Arrays, side: int, packed: bool) -> Arrays:
    (np.savez_compressed if packed else np.savez)(path, **written)
    with np.load(path) as file:
        return dict(file)


def adios2(path: Path, written: Arrays, side: int, packed: bool) -> Arrays:
    package = pytest.importorskip("adios2", exc_type=ImportError)
    with package.Stream(str(path), "w") as stream:
        stream.begin_step()
        for name, values in written.items():
            half = len(values) // 2 if side % 2 else 0
            for low, high in ((0, half), (half, len(values))):
                if low < high:
                    part = np.ascontiguousarray(values[low:high])
                    start = [low, *[0] * (values.ndim - 1)]
                    stream.write(name, part, values.shape, start, part.shape)
        stream.end_step()
    with package.FileReader(str(path)) as file:
        return {name: file.read(name) for name in written}


Writer = Callable[[Path, Arrays, int, bool], Arrays]
FORMATS: dict[str, tuple[str, Writer]] = {
    "hdf5": ("a.h5", hdf5),
    "netcdf": ("a.nc", netcdf),
    "zarr-2": ("a.zarr", zarr_2),
    "zarr-3": ("a.zarr", zarr_3),
    "npy": ("a.npy", npy),
    "npz": ("a.npz", npz),
    "adios2": ("a.bp", adios2),
}
"""Name of a file, and the function that writes one and reads it by the format's library."""

every_format = pytest.mark.parametrize("kind", FORMATS)


@contextmanager
def written_file(
    kind: str, values: Arrays, side: int, packed: bool
) -> Iterator[tuple[Path, Arrays]]:
    """Write a file in a new folder; yield its path, and what the format's own reader gives."""
    name, write = FORMATS[kind]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        yield path, write(path, values, side, packed)


def opened(path: Path, **options: Any) -> Source:
    """Open a source as the process that reads it does, in this process."""
    return make_options(recognise([str(path)]), options).open([str(path)])


Taken = dict[str, tuple[bytes, dict[str, Any]]]


def taken(source: Source, buffer_bytes: int) -> Taken:
    """Return the bytes and attributes of each sample by path."""
    source.buffer_bytes = buffer_bytes
    got: Taken = {}
    for block in source.blocks(layout="path", seed=0):
        for row, (path, at, size) in enumerate(
            zip(block.paths, block.offsets.tolist(), block.lengths.tolist(), strict=True)
        ):
            attributes = {name: column[row] for name, column in block.attributes.items()}
            got[path.decode()] = block.data[at : at + size].tobytes(), attributes
    source.close()
    return got


# ---- what is imported is what the format's own reader gives --------------------------------------


def check_form(attributes: Mapping[str, Any], values: npt.NDArray[Any]) -> None:
    form = ArrayForm.parse(str(attributes["dlfs:dtype"]), str(attributes["dlfs:shape"]))
    assert form == ArrayForm(values.dtype, values.shape)


@every_format
@few
@given(data=st.data())
def test_samples_are_what_the_format_s_own_reader_gives(kind: str, data: st.DataObject) -> None:
    values = data.draw(files(kind))
    side, packed = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    buffer_bytes = data.draw(st.sampled_from([1, 100, 1 << 20]))
    with written_file(kind, values, side, packed) as (path, own):
        rows = taken(opened(path), buffer_bytes)
        whole = taken(opened(path, samples="arrays"), buffer_bytes)
    assert len(rows) == sum(len(array) for array in own.values())
    for name, array in own.items():
        prefix = name or path.stem
        for row in range(len(array)):
            content, attributes = rows[f"{prefix}/{row:08d}"]
            assert content == np.ascontiguousarray(array[row : row + 1]).tobytes()
            check_form(attributes, array[row : row + 1].reshape(array.shape[1:]))
        content, attributes = whole[prefix]
        assert content == np.ascontiguousarray(array).tobytes()
        check_form(attributes, array)


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "npy"])
@few
@given(data=st.data())
def test_fields_and_attributes_are_those_of_the_row(kind: str, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 9))
    values = {name: data.draw(arrays(kind, rows=count)) for name in ("x", "y")}
    label = data.draw(hnp.arrays(np.int64, count))
    side, packed = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    with written_file(kind, {**values, "label": label}, side, packed) as (path, own):
        got = taken(opened(path, fields="x,y", attributes="label"), 200)
    assert [attributes["label"] for _, attributes in got.values()] == own["label"].tolist()
    for row, (content, _) in enumerate(got.values()):
        for name in values:
            assert field_bytes(own[name][row : row + 1]) in content


def field_bytes(row: npt.NDArray[Any]) -> bytes:
    """Return the bytes of a row as a field: a string has no NULs at its end, as numpy has it."""
    if row.ndim == 1 and row.dtype.kind in "SU":
        value = row.item()
        return value if isinstance(value, bytes) else value.encode()
    return np.ascontiguousarray(row).tobytes()


# ---- parts that were never written, compound types, text, members of archives -------------------


def hdf5_parts(path: Path, values: npt.NDArray[Any], fill: Any, rows: list[slice]) -> Any:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        options = {"chunks": chunks_of(values, 2), "fillvalue": fill}
        made = file.create_dataset("x", values.shape, values.dtype, **options)
        for part in rows:
            made[part] = values[part]
    with h5py.File(path) as file:
        return file["x"][...]


def netcdf_parts(path: Path, values: npt.NDArray[Any], fill: Any, rows: list[slice]) -> Any:
    netcdf4 = pytest.importorskip("netCDF4")
    with netcdf4.Dataset(path, "w") as file:
        axes = [f"n{axis}" for axis in range(values.ndim)]
        for number, (axis, length) in enumerate(zip(axes, values.shape, strict=True)):
            file.createDimension(axis, length if number else None)
        options = {"chunksizes": chunks_of(values, 2), "fill_value": fill, "zlib": True}
        made = file.createVariable("x", values.dtype, axes, **options)
        long = file.createVariable("long", "i1", axes[:1])
        long[...] = np.zeros(len(values), "i1")
        made.set_auto_maskandscale(False)
        for part in rows:
            made[part] = values[part]
    with netcdf4.Dataset(path) as file:
        file.set_auto_maskandscale(False)
        return np.asarray(file["x"][...])


def zarr_parts(layout: int, shards: int = 1) -> Callable[..., Any]:
    def write(path: Path, values: npt.NDArray[Any], fill: Any, rows: list[slice]) -> Any:
        package = pytest.importorskip("zarr")
        chunks = chunks_of(values, 2)
        options: dict[str, Any] = {"chunks": chunks, "fill_value": fill}
        if shards > 1:
            options["shards"] = tuple(shards * length for length in chunks)
        root = package.open_group(path, mode="w", zarr_format=layout)
        made = root.create_array("x", shape=values.shape, dtype=values.dtype, **options)
        for part in rows:
            made[part] = values[part]
        return package.open_group(path, mode="r")["x"][...]

    return write


PARTIAL: dict[str, tuple[str, Callable[..., Any]]] = {
    "hdf5": ("a.h5", hdf5_parts),
    "netcdf": ("a.nc", netcdf_parts),
    "zarr-2": ("a.zarr", zarr_parts(2)),
    "zarr-3": ("a.zarr", zarr_parts(3)),
    "zarr-shards": ("a.zarr", zarr_parts(3, 2)),
}


@pytest.mark.parametrize("kind", PARTIAL)
@few
@given(data=st.data())
def test_parts_that_were_never_written_are_refused_or_filled(
    kind: str, data: st.DataObject
) -> None:
    types = TYPES.get(kind, TYPES["zarr-3"])
    dtype = np.dtype(data.draw(st.sampled_from([one for one in types if one[1] in "biuf"])))
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 3)))
    values = data.draw(hnp.arrays(dtype, shape))
    fill = data.draw(hnp.from_dtype(dtype, allow_nan=False))
    spans = st.builds(slice, st.integers(0, shape[0]), st.integers(0, shape[0]))
    rows = data.draw(st.lists(spans, max_size=3))
    buffer_bytes = data.draw(st.sampled_from([1, 30, 1 << 20]))
    name, write = PARTIAL[kind]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        own = write(path, values, fill, rows)
        refusal = ""
        try:
            got = taken(opened(path, select="x"), buffer_bytes)
        except DlfsError as error:
            refusal = str(error)
            got = taken(opened(path, select="x", missing="fill"), buffer_bytes)
        if refusal:
            assert f"import {path}: x (" in refusal
            assert "--option missing=fill" in refusal
        assert b"".join(content for content, _ in got.values()) == own.tobytes()


COMPOUND = np.dtype([("a", "<i2"), ("b", ">f4", (2,)), ("c", [("d", "S3"), ("e", "u1")])])


@few
@given(data=st.data())
def test_members_of_compound_types_are_fields(data: st.DataObject) -> None:
    h5py = pytest.importorskip("h5py")
    values = data.draw(hnp.arrays(COMPOUND, st.integers(1, 9)))
    options: dict[str, Any] = data.draw(
        st.sampled_from(
            [
                {},
                {"chunks": (2,)},
                {"chunks": (4,), "compression": "gzip", "shuffle": True},
                {"chunks": (4,), "compression": "lzf", "fletcher32": True},
            ]
        )
    )
    buffer_bytes = data.draw(st.sampled_from([1, 100, 1 << 20]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.h5"
        with h5py.File(path, "w") as file:
            maxshape = (None,) if options else None
            file.create_dataset("x", data=values, maxshape=maxshape, **options)
        with h5py.File(path) as file:
            own = file["x"][...]
        got = taken(opened(path), buffer_bytes)
        chosen = taken(opened(path, fields="e=x/c.e,b=x/b"), buffer_bytes)
    assert len(got) == len(chosen) == len(own)
    for row, (content, attributes) in zip(own, got.values(), strict=True):
        fields = '{"a":"<i2[]","b":">f4[2]","c.d":"bytes","c.e":"|u1[]"}'
        assert str(attributes["dlfs:fields"]) == fields
        assert content[:2] == row["a"].tobytes()
        assert content[4:12] == row["b"].tobytes()
        assert content[12:] == row["c"]["d"] + row["c"]["e"].tobytes()
    for row, (content, _) in zip(own, chosen.values(), strict=True):
        assert content == row["c"]["e"].tobytes() + bytes(3) + row["b"].tobytes()


TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1
)
VECTORS = st.lists(hnp.arrays("<i4", st.integers(0, 4)), min_size=1, max_size=9)


@pytest.mark.parametrize("kind", ["hdf5", "netcdf", "zarr-2", "zarr-3"])
@few
@given(texts=TEXTS, side=st.integers(1, 4), packed=st.booleans())
def test_texts_are_what_the_format_s_own_reader_gives(
    kind: str, texts: list[str], side: int, packed: bool
) -> None:
    values = np.array(texts, object)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FORMATS[kind][0]
        if kind == "hdf5":
            h5py = pytest.importorskip("h5py")
            with h5py.File(path, "w") as file:
                options = {"compression": "gzip", "shuffle": True} if packed else {}
                chunks = (min(side, len(texts)),)
                kept = h5py.string_dtype()
                file.create_dataset("x", data=values, dtype=kept, chunks=chunks, **options)
        elif kind == "netcdf":
            netcdf4 = pytest.importorskip("netCDF4")
            with netcdf4.Dataset(path, "w") as file:
                file.createDimension("n", None if packed else len(texts))
                file.createVariable("x", str, ("n",))[...] = values
        else:
            package = pytest.importorskip("zarr")
            root = package.open_group(path, mode="w", zarr_format=int(kind[-1]))
            config = {"write_empty_chunks": True}
            made = root.create_array(
                "x", shape=values.shape, dtype=str, chunks=(side,), config=config
            )
            made[...] = values
        got = taken(opened(path), 100)
        fields = taken(opened(path, fields="x"), 100)
    expected = [text.encode() for text in texts]
    assert [content for content, _ in got.values()] == expected
    assert [content for content, _ in fields.values()] == expected


@few
@given(vectors=VECTORS, packed=st.booleans())
def test_vectors_of_any_length_are_what_h5py_gives(
    vectors: list[npt.NDArray[Any]], packed: bool
) -> None:
    h5py = pytest.importorskip("h5py")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.h5"
        with h5py.File(path, "w") as file:
            chunks = (min(2, len(vectors)),)
            options = {"chunks": chunks, "compression": "lzf"} if packed else {}
            kind = h5py.vlen_dtype(np.dtype("<i4"))
            made = file.create_dataset("x", (len(vectors),), kind, **options)
            for row, vector in enumerate(vectors):
                made[row] = vector
        got = [*taken(opened(path), 100).values()]
    for vector, (content, attributes) in zip(vectors, got, strict=True):
        assert content == vector.tobytes()
        check_form(attributes, vector)


MEMBERS = st.text("ab/. é_-", min_size=1, max_size=4)


@few
@given(data=st.data())
def test_members_of_archives_are_what_numpy_reads(data: st.DataObject) -> None:
    names = data.draw(st.lists(MEMBERS, min_size=1, max_size=4, unique=True))
    values = {name: data.draw(arrays("npz")) for name in names}
    if data.draw(st.booleans()):
        values = {name: np.asfortranarray(array) for name, array in values.items()}
    how: Any = data.draw(st.sampled_from(["rows", "arrays", "groups"]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npz"
        np.savez_compressed(path, **values)
        with np.load(path) as file:
            own = dict(file)
        try:
            got = taken(opened(path, samples=how), 100)
        except DlfsError as error:
            refusal = str(error)
        else:
            refusal = ""
    if refusal:
        assert f"import {path}" in refusal
        return
    if how == "rows":
        assert len(got) == sum(map(len, own.values()))
    elif how == "arrays":
        assert sorted(content for content, _ in got.values()) == sorted(
            np.ascontiguousarray(array).tobytes() for array in own.values()
        )
    else:
        found: dict[str, npt.NDArray[Any]] = {}
        for group, (content, _) in got.items():
            with np.load(io.BytesIO(content)) as inner:
                for name in inner.files:
                    found[f"{group}/{name}"] = inner[name]
        assert len(found) == len(own)
        wanted = sorted((str(a.dtype), a.shape, a.tobytes()) for a in own.values())
        assert sorted((str(a.dtype), a.shape, a.tobytes()) for a in found.values()) == wanted


# ---- damage --------------------------------------------------------------------------------------


def parts_of(path: Path) -> list[Path]:
    """Return the files of a source, in order."""
    if path.is_file():
        return [path]
    return sorted(part for part in path.rglob("*") if part.is_file())


def cut(path: Path, draw: Callable[[Any], Any]) -> None:
    os.truncate(path, draw(st.integers(0, max(0, path.stat().st_size - 1))))


def flip(path: Path, draw: Callable[[Any], Any]) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[draw(st.integers(0, len(content) - 1))] ^= 1 << draw(st.integers(0, 7))
    path.write_bytes(content)


def overwrite(path: Path, draw: Callable[[Any], Any]) -> None:
    content = bytearray(path.read_bytes())
    at = draw(st.integers(0, len(content)))
    length = draw(st.sampled_from([1, 4, 8, 64]))
    content[at : at + length] = draw(st.sampled_from([b"\0", b"\xff", b"\x7f"])) * length
    path.write_bytes(content)


def delete(path: Path, draw: Callable[[Any], Any]) -> None:
    path.unlink()


def repeat(path: Path, draw: Callable[[Any], Any]) -> None:
    path.write_bytes(path.read_bytes() * 2)


DAMAGES = (cut, flip, overwrite, delete, repeat)


def outcome(path: Path, **options: Any) -> Taken | str:
    """Return the samples of a damaged source, or its error; the process that reads it may die."""
    try:
        source = open_source(path, options=options)
        try:
            return taken(source, 1 << 20)
        finally:
            source.close()
    except DlfsError as error:
        return str(error)


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "adios2"])
@settings(few, max_examples=max(2, EXAMPLES // 4))
@given(data=st.data())
def test_damage_is_an_error_or_gives_the_same_twice(kind: str, data: st.DataObject) -> None:
    values = data.draw(files(kind))
    side, packed = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    with written_file(kind, values, side, packed) as (path, _):
        damage = data.draw(st.sampled_from(DAMAGES))
        part = data.draw(st.sampled_from(parts_of(path)))
        damage(part, data.draw)
        first, second = outcome(path), outcome(path)
    assert first == second
    if isinstance(first, str):
        assert str(path) in first


@pytest.mark.parametrize("kind", ["zarr-2", "zarr-3"])
@few
@given(data=st.data())
def test_every_lost_chunk_is_named(kind: str, data: st.DataObject) -> None:
    values = {"g/x": data.draw(arrays(kind).filter(lambda array: array.size > 0))}
    side, packed = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    with written_file(kind, values, side, packed) as (path, _):
        chunks = [
            part for part in parts_of(path / "g/x") if not part.name.startswith((".z", "zarr"))
        ]
        lost = data.draw(st.sampled_from(chunks))
        lost.unlink()
        with pytest.raises(DlfsError, match=str(lost.relative_to(path))):
            opened(path)
        assert len(taken(opened(path, missing="fill"), 100)) == len(values["g/x"])
        shutil.rmtree(path / "g")
