"""Tests of arrays that lack parts, and of stores and files that name code or other files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlfs.errors import FormatError
from dlfs.ingest.importer import open_source
from tests.unit.ingest.array_writers import rows_of, take, write_hdf5, write_zarr

VALUES = np.arange(1, 60 * 7 + 1, dtype=np.float64).reshape(60, 7)
FILL = -5.0


def filled(*rows: slice) -> np.ndarray[Any, Any]:
    values = VALUES.copy()
    for part in rows:
        values[part] = FILL
    return values


def check_lacks(
    path: Path, match: str, expected: Any, noun: str, count: int, **options: Any
) -> None:
    """Check that a source is refused with the part that it lacks, and filled if that is asked."""
    with pytest.raises(FormatError, match=match) as caught:
        open_source(path, options=options)
    assert str(caught.value).startswith(f"import {path}: ")
    assert "--option missing=fill takes the fill value" in str(caught.value)
    assert (noun == "chunk") == ("writers may leave out chunks" in str(caught.value))
    source = open_source(path, options={"missing": "fill", **options})
    assert take(source) == rows_of("x", expected)  # type: ignore[arg-type]
    assert source.skipped[f"missing {noun}, taken as the fill value"] == count


# ---- HDF5 ----------------------------------------------------------------------------------------


@pytest.fixture
def h5py() -> Any:
    return pytest.importorskip("h5py")


@pytest.mark.parametrize("fill_time", ["alloc", "never", "ifset"])
@pytest.mark.parametrize("filters", [{}, {"compression": "gzip", "shuffle": True}])
def test_hdf5_chunks_that_were_never_written(
    tmp_path: Path, h5py: Any, fill_time: str, filters: dict[str, Any]
) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        x = file.create_dataset(
            "x", (60, 7), "f8", chunks=(8, 4), fillvalue=FILL, fill_time=fill_time, **filters
        )
        x[:24], x[32:] = VALUES[:24], VALUES[32:]
    match = r"x \(float64, 60x7\): expected 16 chunks, got 14: the chunk at \(24, 0\) and 1 more"
    check_lacks(path, match, filled(slice(24, 32)), "chunk", 2)


def test_hdf5_datasets_that_were_never_written(tmp_path: Path, h5py: Any) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (60, 7), "f8", fillvalue=FILL)
        file.create_dataset("empty", (0, 7), "f8")
    match = r"x .*: expected 1 part, got 0: the whole array was never written"
    check_lacks(path, match, filled(slice(None)), "part", 1)


def test_hdf5_members_of_chunks_that_were_never_written(tmp_path: Path, h5py: Any) -> None:
    path, kind = tmp_path / "a.h5", np.dtype("i4,f4")
    fill = np.array((3, 2.5), kind)
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (20,), kind, chunks=(10,), fillvalue=fill, fill_time="never")
        x[:10] = np.ones(10, kind)
    with pytest.raises(FormatError, match=r"expected 2 chunks, got 1: the chunk at \(10,\)"):
        open_source(path)
    source = open_source(path, options={"missing": "fill"})
    block, _ = source.blocks(layout="path", seed=0)
    last = int(block.offsets[-1])
    assert block.data[last : last + 8].tobytes() == fill.tobytes()
    assert source.skipped == {"missing chunk, taken as the fill value": 1}


@pytest.mark.parametrize("cut", ["short", "absent"])
def test_hdf5_external_files(tmp_path: Path, h5py: Any, cut: str) -> None:
    path, raw = tmp_path / "a.h5", VALUES.tobytes()
    (tmp_path / "first.raw").write_bytes(b"head" + raw[: 30 * 56])
    (tmp_path / "last.raw").write_bytes(raw[30 * 56 :])
    with h5py.File(path, "w") as file:
        parts = [(b"first.raw", 4, 30 * 56), (b"last.raw", 0, h5py.h5f.UNLIMITED)]
        file.create_dataset("x", (60, 7), "f8", external=parts, fillvalue=FILL)
    assert take(open_source(path)) == rows_of("x", VALUES)  # type: ignore[arg-type]
    if cut == "short":
        os.truncate(tmp_path / "last.raw", 20 * 56 - 3)
        expected, count = filled(slice(50, 60)), 10 * 56 + 3
        expected[49, 6] = FILL
    else:
        os.remove(tmp_path / "last.raw")
        expected, count = filled(slice(30, 60)), 30 * 56
    check_lacks(
        path, r"expected 3360 bytes, got .* of the file 'last\.raw'", expected, "byte", count
    )


def virtual(h5py: Any, path: Path, names: list[str], rows: int = 30) -> None:
    layout = h5py.VirtualLayout((60, 7), "f8")
    for number, name in enumerate(names):
        layout[number * rows : (number + 1) * rows] = h5py.VirtualSource(name, "d", (rows, 7))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout, fillvalue=FILL)


def test_hdf5_virtual_sources(tmp_path: Path, h5py: Any) -> None:
    path = tmp_path / "a.h5"
    write_hdf5(tmp_path / "one.h5", {"d": VALUES[:30]})
    write_hdf5(tmp_path / "two.h5", {"d": VALUES[30:]})
    virtual(h5py, path, ["one.h5", "two.h5"])
    assert take(open_source(path)) == rows_of("x", VALUES)  # type: ignore[arg-type]
    (tmp_path / "two.h5").unlink()
    match = r"expected 2 virtual sources, got 1: the file 'two\.h5'"
    check_lacks(path, match, filled(slice(30, 60)), "virtual source", 1)
    write_hdf5(tmp_path / "two.h5", {"e": VALUES})
    match = r"got 1: the dataset 'd' of 'two\.h5'"
    check_lacks(path, match, filled(slice(30, 60)), "virtual source", 1)
    with h5py.File(tmp_path / "two.h5", "w") as file:
        file.create_dataset("d", (30, 7), "f8", chunks=(10, 7), fillvalue=FILL)[10:] = VALUES[40:]
    match = r"'d' of 'two\.h5', which lacks the chunk at \(0, 0\)"
    check_lacks(path, match, filled(slice(30, 40)), "virtual source", 1)
    virtual(h5py, path, ["one.h5"])
    check_lacks(path, "got 210: an element without", filled(slice(30, 60)), "element", 210)


def test_hdf5_virtual_sources_of_a_file_that_is_a_link(tmp_path: Path, h5py: Any) -> None:
    real, other = tmp_path / "real", tmp_path / "other"
    real.mkdir()
    other.mkdir()
    write_hdf5(real / "one.h5", {"d": VALUES[:30]})
    write_hdf5(real / "two.h5", {"d": VALUES[30:]})
    virtual(h5py, real / "a.h5", ["one.h5", "two.h5"])
    path = other / "a.h5"
    path.symlink_to(real / "a.h5")
    assert take(open_source(path)) == rows_of("x", VALUES)  # type: ignore[arg-type]
    write_hdf5(other / "one.h5", {"d": -VALUES[:30]})  # the library looks next to the link first
    expected = np.concatenate([-VALUES[:30], VALUES[30:]])
    assert take(open_source(path)) == rows_of("x", expected)  # type: ignore[arg-type]
    (real / "two.h5").unlink()
    expected[30:] = FILL
    check_lacks(path, r"the file 'two\.h5'", expected, "virtual source", 1)
    (real / "two.h5").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match="expected files in the folder"):
        open_source(path)


@pytest.mark.parametrize("place", ["/elsewhere", "..", "folder/../.."])
def test_hdf5_files_outside_the_folder(tmp_path: Path, h5py: Any, place: str) -> None:
    folder = tmp_path / "in" / "folder"
    folder.mkdir(parents=True)
    write_hdf5(tmp_path / "in" / "one.h5", {"d": VALUES})
    (tmp_path / "in" / "one.raw").write_bytes(VALUES.tobytes())
    with h5py.File(folder / "raw.h5", "w") as file:
        file.create_dataset("x", (60, 7), "f8", external=[(f"{place}/one.raw", 0, 3360)])
    virtual(h5py, folder / "virtual.h5", [f"{place}/one.h5"], 60)
    for name in ("raw.h5", "virtual.h5"):
        for options in ({}, {"missing": "fill"}):
            with pytest.raises(
                FormatError, match=rf"{name}: x: expected files in the folder .* got"
            ):
                open_source(folder / name, options=options)


# ---- NetCDF --------------------------------------------------------------------------------------


@pytest.mark.parametrize("filters", [{}, {"zlib": True}])
def test_netcdf_parts_that_were_never_written(tmp_path: Path, filters: dict[str, Any]) -> None:
    netcdf = pytest.importorskip("netCDF4")
    path = tmp_path / "a.nc"
    with netcdf.Dataset(path, "w") as file:
        file.createDimension("n", None)
        file.createDimension("k", 7)
        make = file.createVariable
        x = make("x", "f8", ("n", "k"), fill_value=FILL, chunksizes=(8, 7), **filters)
        x[:24], x[32:60] = VALUES[:24], VALUES[32:]
        make("short", "f8", ("n", "k"), fill_value=FILL, **filters)[:10] = VALUES[:10]
        make("no", "f8", ("n", "k"), fill_value=False, chunksizes=(8, 7), **filters)[:8] = 1
    match = r"expected 8 chunks, got 7: the chunk at \(24, 0\)"
    check_lacks(path, match, filled(slice(24, 32)), "chunk", 1, select="x")
    with pytest.raises(FormatError, match=r"short .* expected 60 rows, got 10: row 10 and 49"):
        open_source(path, options={"select": "short"})
    source = open_source(path, options={"select": "short", "missing": "fill"})
    expected = rows_of("short", filled(slice(10, None)))
    assert take(source) == expected  # type: ignore[arg-type]
    source = open_source(path, options={"select": "no", "missing": "fill"})
    with pytest.raises(FormatError, match="variable that has no fill value"):
        take(source)  # type: ignore[arg-type]


# ---- Zarr ----------------------------------------------------------------------------------------

ZARR_CHUNKS: list[tuple[dict[str, Any], str, int, slice]] = [
    ({"layout": 2, "chunks": (10, 7)}, "x/3.0", 1, slice(30, 40)),
    ({"layout": 3, "chunks": (10, 7)}, "x/c/3/0", 1, slice(30, 40)),
    ({"layout": 3, "chunks": (10, 7), "shards": (20, 7)}, "x/c/1/0", 2, slice(20, 40)),
]


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize(("options", "chunk", "count", "rows"), ZARR_CHUNKS)
def test_zarr_chunks_that_are_lost(
    tmp_path: Path, options: dict[str, Any], chunk: str, count: int, rows: slice, archive: bool
) -> None:
    path = tmp_path / "a.zarr"
    write_zarr(path, {"x": VALUES}, fill_value=FILL, **options)
    (path / chunk).unlink()
    if archive:
        path = Path(shutil.make_archive(str(path), "zip", path))
    match = rf"x \(float64, 60x7\): expected 6 chunks, got {6 - count}: the chunk {chunk}"
    check_lacks(path, match, filled(rows), "chunk", count)


def test_zarr_chunks_that_a_shard_lacks(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    path = tmp_path / "a.zarr"
    options = {"shape": (50, 7), "chunks": (10, 7), "shards": (20, 7), "dtype": "f8"}
    root = zarr.open_group(path, mode="w")
    x = root.create_array("x", fill_value=FILL, **options)
    x[:30], x[40:] = VALUES[:30], VALUES[40:50]
    match = r"expected 6 chunks, got 5: the chunk \(1, 0\) of x/c/1/0"
    check_lacks(path, match, filled(slice(30, 40))[:50], "chunk", 1)


@pytest.mark.parametrize("kind", ["nested", "packed", "other index"])
@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec")
def test_zarr_shards_whose_chunks_are_not_counted(tmp_path: Path, kind: str) -> None:
    """The reader gives fill values for chunks that such shards lack, too."""
    zarr = pytest.importorskip("zarr")
    path = tmp_path / "a.zarr"
    codecs = zarr.codecs
    inner = [codecs.BytesCodec()]
    if kind == "nested":
        inner = [codecs.ShardingCodec(chunk_shape=(5, 7), codecs=inner)]
    index = [codecs.BytesCodec(), *([codecs.GzipCodec()] if kind == "other index" else [])]
    shards = codecs.ShardingCodec(chunk_shape=(10, 7), codecs=inner, index_codecs=index)
    options: dict[str, Any] = {"serializer": shards, "compressors": None}
    if kind == "packed":
        options["compressors"] = [codecs.GzipCodec()]
    root = zarr.open_group(path, mode="w")
    x = root.create_array("x", shape=(60, 7), chunks=(20, 7), dtype="f8", **options)
    x[:30] = VALUES[:30]
    x[40:] = VALUES[40:]
    match = r"expected shards that have chunks and no further codec, got the codecs .*sharding_ind"
    if kind == "other index":
        match = r"x/c/0/0: expected a shard's index by bytes and crc32c, got .*GzipCodec"
    for missing in ("error", "fill"):
        with pytest.raises(FormatError, match=rf"a\.zarr: .*{match}"):
            open_source(path, options={"missing": missing})


@pytest.mark.parametrize("layout", [2, 3])
@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_zarr_arrays_that_consolidated_metadata_names(tmp_path: Path, layout: int) -> None:
    zarr = pytest.importorskip("zarr")
    path = tmp_path / "a.zarr"
    write_zarr(path, {"x": VALUES, "y": VALUES}, layout=layout, chunks=(10, 7), fill_value=FILL)
    zarr.consolidate_metadata(path)
    shutil.rmtree(path / "x")
    match = r"x .*: expected 6 chunks, got 0"
    check_lacks(path, match, filled(slice(None)), "chunk", 6, select="x")
    write_zarr(path.with_name("b"), {"x": VALUES[:50]}, layout=layout, chunks=(10, 7))
    shutil.copytree(path.with_name("b") / "x", path / "x")
    with pytest.raises(FormatError, match="x: expected the shape of the consolidated metadata"):
        open_source(path, options={"select": "x"})
    assert len(take(open_source(path, options={"select": "y"}))) == 60  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["pickle", "numcodecs.pickle", "other"])
@pytest.mark.parametrize("where", [".zarray", ".zmetadata", "zarr.json"])
def test_zarr_codecs_that_could_run_code(tmp_path: Path, codec: str, where: str) -> None:
    path = tmp_path / "a.zarr"
    write_zarr(path, {"x": VALUES}, layout=3 if where == "zarr.json" else 2)
    key = path / ("" if where == ".zmetadata" else "x") / where
    array = json.loads((path / "x" / where.replace(".zmetadata", ".zarray")).read_text())
    if where == "zarr.json":
        array["codecs"].append({"name": codec, "configuration": {}})
    else:
        array["filters"] = [{"id": codec, "protocol": 5}]
    key.write_text(json.dumps({"metadata": {"x/.zarray": array}} if key.parent == path else array))
    with pytest.raises(FormatError, match=rf"{where}: expected a codec .*, got '{codec}'"):
        open_source(path)


@pytest.mark.parametrize("key", ["x/c/0/0", "x/zarr.json", "zarr.json", "y/other"])
def test_zarr_entries_that_are_no_files(tmp_path: Path, key: str) -> None:
    path = tmp_path / "a.zarr"
    write_zarr(path, {"x": VALUES})
    (path / key).parent.mkdir(exist_ok=True)
    (path / key).unlink(missing_ok=True)
    os.mkfifo(path / key)
    with pytest.raises(FormatError, match=rf"a\.zarr: .*expected regular files, got '{key}'"):
        open_source(path)


def test_zarr_grids_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    write_zarr(path, {"x": VALUES})
    array = json.loads((path / "x/zarr.json").read_text())
    array["shape"] = [1 << 40, 7]
    (path / "x/zarr.json").write_text(json.dumps(array))
    with pytest.raises(FormatError, match=r"a\.zarr: .*x: expected a grid of at most \d+ chunks"):
        open_source(path)


# ---- nothing outside is opened -------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_no_file_that_a_source_names_is_opened(tmp_path: Path, h5py: Any) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "outside.raw").write_bytes(VALUES.tobytes())
    write_hdf5(tmp_path / "outside.h5", {"d": VALUES})
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("raw", (60, 7), "f8", external=[(b"../outside.raw", 0, 3360)])
        file["link"] = h5py.ExternalLink("../outside.h5", "/d")
        file["own"] = VALUES
    virtual(h5py, folder / "b.h5", ["../outside.h5", str(tmp_path / "outside.h5")])
    with h5py.File(folder / "way.h5", "w") as file:
        file["d"] = h5py.ExternalLink("../outside.h5", "/d")
        file["g"] = h5py.ExternalLink("../outside.h5", "/")
    virtual(h5py, folder / "c.h5", ["way.h5"], 60)
    script = (
        "import sys\n"
        "from dlfs.errors import DlfsError\n"
        "from dlfs.ingest.importer import open_source\n"
        "for path in sys.argv[1:]:\n"
        "    for options in ({}, {'missing': 'fill'}, {'select': 'own'}, {'fields': '*'}):\n"
        "        try:\n"
        "            source = open_source(path, options=options)\n"
        "            list(source.blocks(layout='path', seed=0))\n"
        "            source.close()\n"
        "            print(path, options)\n"
        "        except DlfsError:\n"
        "            pass\n"
    )
    log = tmp_path / "log"
    trace = ["strace", "-f", "--seccomp-bpf", "-e", "trace=open,openat", "-o", str(log)]
    done = subprocess.run(
        [
            *trace,
            sys.executable,
            "-c",
            script,
            *(folder / name for name in ("a.h5", "b.h5", "c.h5")),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("own") == 1
    opened = log.read_text()
    assert "a.h5" in opened
    assert "c.h5" in opened
    assert "way.h5" in opened
    assert "outside" not in opened
