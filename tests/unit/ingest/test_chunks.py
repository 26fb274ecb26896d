"""Tests of chunks that are shorter or longer than declared behind every filter, and of filters."""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlfs._native.checksums import crc32c
from dlfs.errors import DlfsError, FormatError
from dlfs.ingest.formats.hdf5.chunks import fletcher32
from dlfs.ingest.importer import open_source
from tests.unit.ingest.array_writers import rows_of, take, write_zarr

VALUES = np.arange(1, 60 * 7 + 1, dtype=np.float64).reshape(60, 7)


@pytest.fixture
def h5py() -> Any:
    return pytest.importorskip("h5py")


# ---- HDF5 ----------------------------------------------------------------------------------------


def literals(data: bytes) -> bytes:
    """A stream of LZF without copies."""
    parts = [data[at : at + 32] for at in range(0, len(data), 32)]
    return b"".join(bytes([len(part) - 1]) + part for part in parts)


def shuffled(data: bytes, size: int = 8) -> bytes:
    """Bytes as the filter shuffle writes them; those of a last element that is cut stay behind."""
    whole = len(data) // size * size
    return np.frombuffer(data[:whole], "u1").reshape(-1, size).T.tobytes() + data[whole:]


FILTERS: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, bytes),
    "gzip": ({"compression": "gzip"}, zlib.compress),
    "shuffle": ({"shuffle": True}, shuffled),
    "shuffle gzip": (
        {"compression": "gzip", "shuffle": True},
        lambda data: zlib.compress(shuffled(data)),
    ),
    "lzf": ({"compression": "lzf"}, literals),
    "shuffle lzf": (
        {"compression": "lzf", "shuffle": True},
        lambda data: literals(shuffled(data)),
    ),
    "checksum": ({"fletcher32": True}, lambda data: data + fletcher32(data).to_bytes(4, "little")),
}
"""Options of h5py, and what they do with a chunk."""


@pytest.mark.parametrize("kind", FILTERS)
@pytest.mark.parametrize("change", [-8, -3, 8])
def test_hdf5_chunks_of_another_size(tmp_path: Path, h5py: Any, kind: str, change: int) -> None:
    path = tmp_path / "a.h5"
    options, encode = FILTERS[kind]
    whole = VALUES[20:30].tobytes()
    for data in (whole, whole[:change] if change < 0 else whole + bytes(change)):
        with h5py.File(path, "w") as file:
            x = file.create_dataset("x", data=VALUES, chunks=(10, 7), **options)
            x.id.write_direct_chunk((20, 0), encode(data))
        if data is whole:
            assert take(open_source(path)) == rows_of("x", VALUES)  # type: ignore[arg-type]
            continue
        with pytest.raises(
            FormatError, match=r"a\.h5: x.*chunk at \(20, 0\): expected .*560 bytes"
        ):
            take(open_source(path))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["szip", "szip gzip", "scaleoffset", "scaleoffset gzip"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_hdf5_chunks_whose_header_has_another_size(
    tmp_path: Path, h5py: Any, kind: str, is_cut: bool
) -> None:
    """The library gives memory that nobody wrote, or that lies behind the chunk."""
    path = tmp_path / "a.h5"
    values = np.arange(60 * 8, dtype="i4").reshape(60, 8)
    is_szip, is_packed = kind.startswith("szip"), kind.endswith("gzip")
    if is_szip and not h5py.h5z.filter_avail(h5py.h5z.FILTER_SZIP):
        pytest.skip("this HDF5 has no szip")
    with h5py.File(path, "w") as file:
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_chunk((10, 8))
        if is_szip:
            plan.set_szip(h5py.h5z.SZIP_NN_OPTION_MASK, 8)
        else:
            plan.set_scaleoffset(h5py.h5z.SO_INT, 0)
        if is_packed:
            plan.set_deflate(4)
        space = h5py.h5s.create_simple(values.shape)
        made = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, space, plan)
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
        file.flush()
        mask, data = made.read_direct_chunk((20, 0))
        data = zlib.decompress(data) if is_packed else data
        if is_cut and is_szip:
            data = (320 - 32).to_bytes(4, "little") + data[4:]
        elif is_cut:
            data = data[:-5]
        made.write_direct_chunk((20, 0), zlib.compress(data) if is_packed else data, mask)
    if not is_cut:
        assert take(open_source(path)) == rows_of("x", values)  # type: ignore[arg-type]
        return
    with pytest.raises(FormatError, match=r"a\.h5: x.* chunk at \(20, 0\): expected \d+ bytes"):
        take(open_source(path))  # type: ignore[arg-type]


def write_bfloat16(h5py: Any, file: Any, values: Any) -> None:
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_chunk((4,))
    plan.set_deflate(4)
    stored = h5py.h5t.IEEE_F32LE.copy()
    stored.set_fields(15, 7, 8, 0, 7)
    stored.set_size(2)
    stored.set_ebias(127)
    made = h5py.h5d.create(file.id, b"x", stored, h5py.h5s.create_simple(values.shape), plan)
    made.write(h5py.h5s.ALL, h5py.h5s.ALL, values)


@pytest.mark.parametrize("kind", ["bfloat16", "text"])
def test_hdf5_short_chunks_of_types_that_h5py_converts(
    tmp_path: Path, h5py: Any, kind: str
) -> None:
    path = tmp_path / "a.h5"
    values = np.array([1.5, -2.0, 3.0, 0.25] * 2, "f4")
    with h5py.File(path, "w") as file:
        if kind == "bfloat16":
            write_bfloat16(h5py, file, values)
        else:
            options = {"chunks": (4,), "compression": "gzip", "dtype": h5py.string_dtype()}
            file.create_dataset("x", data=list("abcdefgh"), **options)
    got = [*take(open_source(path)).values()]  # type: ignore[arg-type]
    assert b"".join(got) == (values.tobytes() if kind == "bfloat16" else b"abcdefgh")
    with h5py.File(path, "r+") as file:
        mask, data = file["x"].id.read_direct_chunk((4,))
        short = zlib.decompress(data)[:-1]
        file["x"].id.write_direct_chunk((4,), zlib.compress(short), mask)
    with pytest.raises(FormatError, match=rf"chunk at \(4,\): expected {len(short) + 1} bytes"):
        take(open_source(path))  # type: ignore[arg-type]


def test_fletcher32_is_the_library_s(tmp_path: Path, h5py: Any) -> None:
    random = np.random.default_rng(5)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for size in (1, 2, 3, 719, 720, 721, 100_001):
            for number, low in enumerate((0, 1, 255)):
                data = random.integers(low, 256 if low else 1, size, np.uint8)
                name = f"{size}-{number}"
                made = file.create_dataset(name, data=data, chunks=(size,), fletcher32=True)
                file.flush()
                _, stored = made.id.read_direct_chunk((0,))
                assert fletcher32(stored[:-4]) == int.from_bytes(stored[-4:], "little")


@pytest.mark.parametrize(
    "order", list(itertools.permutations(("deflate", "shuffle", "fletcher32")))
)
@pytest.mark.parametrize("dtype", ["<f8", "<i2", "u1"])
def test_hdf5_filters_in_any_order(
    tmp_path: Path, h5py: Any, order: tuple[str, ...], dtype: str
) -> None:
    values = np.arange(40 * 7).reshape(40, 7).astype(dtype)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_chunk((9, 7))
        for name in order:
            getattr(plan, f"set_{name}")(*((4,) if name == "deflate" else ()))
        space = h5py.h5s.create_simple(values.shape)
        kind = h5py.h5t.py_create(values.dtype)
        made = h5py.h5d.create(file.id, b"x", kind, space, plan)
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
    assert take(open_source(tmp_path / "x.h5")) == rows_of("x", values)  # type: ignore[arg-type]


# ---- NetCDF --------------------------------------------------------------------------------------


def test_netcdf_chunks_that_are_short(tmp_path: Path) -> None:
    netcdf, h5py = pytest.importorskip("netCDF4"), pytest.importorskip("h5py")
    path = tmp_path / "a.nc"
    with netcdf.Dataset(path, "w") as file:
        file.createDimension("n", 60)
        file.createDimension("k", 7)
        file.createVariable("x", "f8", ("n", "k"), zlib=True, chunksizes=(10, 7))[:] = VALUES
    assert take(open_source(path)) == rows_of("x", VALUES)  # type: ignore[arg-type]
    with h5py.File(path, "r+") as file:
        data = zlib.compress(np.zeros(9, np.uint8).tobytes())
        file["x"].id.write_direct_chunk((50, 0), data)
    with pytest.raises(FormatError, match=r"a\.nc: x, .* chunk at \(50, 0\): expected 560 bytes"):
        take(open_source(path))  # type: ignore[arg-type]


# ---- Zarr ----------------------------------------------------------------------------------------

V2: dict[str, dict[str, Any]] = {
    "none": {},
    **{
        name: {"compressors": [{"id": name}]}
        for name in ("blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd")
    },
    "delta": {"filters": [{"id": "delta", "dtype": "<f8"}]},
    "shuffle": {"filters": [{"id": "shuffle", "elementsize": 8}], "compressors": [{"id": "lz4"}]},
    "shuffled blosc": {"compressors": [{"id": "blosc", "shuffle": 1, "clevel": 9}]},
}
V3: dict[str, Any] = {
    "none": None,
    "blosc": [{"name": "blosc", "configuration": {}}],
    "gzip": [{"name": "gzip", "configuration": {"level": 5}}],
    "zstd": [{"name": "zstd", "configuration": {}}],
    "crc32c": [{"name": "crc32c", "configuration": {}}],
}


CASES = [
    *(pytest.param(2, name, 1, id=f"2-{name}") for name in V2),
    *(pytest.param(3, name, shards, id=f"3-{name}-{shards}") for name in V3 for shards in (1, 2)),
]


def write_case(path: Path, layout: int, name: str, shards: int, rows: int) -> Path:
    """Write an array of six chunks; return the file of the second chunk or shard."""
    if layout == 2:
        numcodecs = pytest.importorskip("numcodecs")
        options: dict[str, Any] = {"compressors": None}
        for kind, codec in V2[name].items():
            made = [numcodecs.get_codec(one) for one in codec or ()]
            options[kind] = made or None
    else:
        options = {"compressors": V3[name]}
    if shards > 1:
        options["shards"] = (shards * rows, 7)
    values = np.resize(VALUES, (6 * rows, 7))
    write_zarr(path, {"x": values}, layout=layout, chunks=(rows, 7), **options)
    return path / {2: "x/1.0", 3: "x/c/1/0"}[layout]


@pytest.mark.parametrize(("layout", "name", "shards"), CASES)
def test_zarr_chunks_of_another_size(tmp_path: Path, layout: int, name: str, shards: int) -> None:
    path = tmp_path / "a.zarr"
    chunk = write_case(path, layout, name, shards, 10)
    assert take(open_source(path)) == rows_of("x", VALUES)  # type: ignore[arg-type]
    for rows in (9, 11):
        other = write_case(tmp_path / f"{rows}.zarr", layout, name, shards, rows)
        chunk.write_bytes(other.read_bytes())
        at = rf"the chunk at \({10 * shards}, 0\), in x/{'1.0' if layout == 2 else 'c/1/0'}: "
        with pytest.raises(FormatError, match=rf"a\.zarr: x, rows .*: {at}"):
            take(open_source(path))  # type: ignore[arg-type]


@pytest.mark.parametrize(("layout", "name", "shards"), CASES)
def test_zarr_chunks_that_are_cut(tmp_path: Path, layout: int, name: str, shards: int) -> None:
    path = tmp_path / "a.zarr"
    chunk = write_case(path, layout, name, shards, 10)
    whole = chunk.read_bytes()
    damaged = [whole[:size] for size in (len(whole) - 1, len(whole) // 2, 10, 0)]
    if shards > 1:
        entries = np.frombuffer(whole[-36:-4], "<u8").copy()
        entries[1] -= 3  # the size of the first chunk in the shard
        index = entries.tobytes()
        damaged.append(whole[:-36] + index + crc32c(index).to_bytes(4, "little"))
    for data in damaged:
        chunk.write_bytes(data)
        with pytest.raises(DlfsError, match=r"a\.zarr: .*(1\.0|c/1/0)"):
            take(open_source(path))  # type: ignore[arg-type]
