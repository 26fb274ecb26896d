"""Every format's fields equal what the source's own reader gives: one table over all formats.

Each function of ``SOURCES`` writes a source with the format's own library, and returns what that
library reads from it: the values of each sample by the names of its fields, in the order of paths.
"""

from __future__ import annotations

import base64
import io
import json
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlfs.ingest.importer import import_dataset, open_source
from dlfs.volume.volume import Volume
from tests.contract.importing import example_messages, frame
from tests.support.files import tar
from tests.support.shards import write_mds

COUNT = 5
TEXTS = ["", "nul \0 inside", "größer 大きい 🌍", "line\nbreak", "plain"]
NO_NULS = np.array([text.replace("\0", "") for text in TEXTS], object)
"""Texts as those formats take them whose strings end at the first NUL."""
BLOBS = [b"", b"\0\xff\0", bytes(range(256)), b"\x89PNG", b"x" * 5000]
VECTORS = [np.arange(i * i, dtype=np.float32) for i in range(COUNT)]
GRIDS = [np.arange(i * 3, dtype=np.int16).reshape(i, 3) for i in range(COUNT)]
VOLUMES = np.arange(COUNT * 24, dtype=np.float32).reshape(COUNT, 2, 3, 4)
WAVES = (VOLUMES[:, 0] * (1 + 2j)).astype(np.complex64)
WIDE_WAVES = WAVES.astype(np.complex128)
LABELS = np.arange(COUNT, dtype=np.int64) - 2
FLAGS = np.array([True, False, True, True, False])
HALVES = np.array([0.5, -0.0, np.inf, np.nan, 6e-8], np.float16)
BIG = np.array([1, -2, 3, 1 << 30, 0], ">i4")
BRAIN = np.arange(COUNT * 4, dtype=np.uint16).reshape(COUNT, 4)
"""Bits of bfloat16, which numpy lacks."""

Sample = dict[str, Any]


@dataclass
class Written:
    """A source, and what its own reader reads."""

    paths: list[Path]
    samples: list[Sample]
    options: dict[str, Any] = field(default_factory=lambda: {"fields": "*"})
    format_name: str = "auto"


def rows(arrays: dict[str, Any], count: int = COUNT) -> list[Sample]:
    return [{name: values[row] for name, values in arrays.items()} for row in range(count)]


def as_npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


# ---- archives and records ------------------------------------------------------------------------


def webdataset(folder: Path) -> Written:
    path = folder / "x.tar"
    members = []
    for row in range(COUNT):
        parts = {
            "jpg": BLOBS[row],
            "txt": TEXTS[row].encode(),
            "cls": b"%d" % LABELS[row],
            "wave.npy": as_npy(WAVES[row]),
            "big.npy": as_npy(BIG[: row + 1]),
            "grid.npy": as_npy(np.asfortranarray(GRIDS[row])),
            "raw": BRAIN[row].tobytes(),
        }
        members += [(f"{row}.{name}", data) for name, data in parts.items()]
    path.write_bytes(tar(*members))
    samples = []
    for row in range(COUNT):
        with tarfile.open(path) as archive:
            sample = {name: archive.extractfile(f"{row}.{name}").read() for name in parts}
        arrays = {name: np.load(io.BytesIO(sample[name])) for name in sample if "npy" in name}
        decoded = {"txt": sample["txt"].decode(), "cls": np.int64(int(sample["cls"]))}
        raw = np.frombuffer(sample["raw"], np.uint16)
        samples.append({"jpg": sample["jpg"], **decoded, **arrays, "raw": raw})
    return Written([path], samples, {"fields": "*,raw:bfloat16[4]"}, "webdataset")


def tfrecord(folder: Path) -> Written:
    pb = example_messages()
    records = []
    for row in range(COUNT):
        example = pb.Example()
        features = example.features.feature
        features["image"].bytes_list.value.append(BLOBS[row])
        features["text"].bytes_list.value.append(TEXTS[row].encode())
        features["label"].int64_list.value.append(int(LABELS[row]))
        features["boxes"].float_list.value.extend(VOLUMES[row, 0].reshape(-1)[: 4 * (row % 4)])
        features["ids"].int64_list.value.extend(range(row))
        features["volume"].bytes_list.value.append(VOLUMES[row].astype(">f4").tobytes())
        features["brain"].bytes_list.value.append(BRAIN[row].tobytes())
        records.append(example.SerializeToString())
    path = folder / "x.tfrecord"
    path.write_bytes(b"".join(map(frame, records)))
    samples = []
    for record in records:
        found = pb.Example.FromString(record).features.feature
        samples.append(
            {
                "image": found["image"].bytes_list.value[0],
                "text": found["text"].bytes_list.value[0].decode(),
                "label": np.int64(found["label"].int64_list.value[0]),
                "boxes": np.array(found["boxes"].float_list.value, np.float32).reshape(-1, 4),
                "ids": np.array(found["ids"].int64_list.value, np.int64),
                "volume": np.frombuffer(found["volume"].bytes_list.value[0], ">f4").reshape(
                    2, 3, 4
                ),
                "brain": np.frombuffer(found["brain"].bytes_list.value[0], np.uint16),
            }
        )
    types = "text:text,label:i8[],boxes:f4[?,4],volume:>f4[2,3,4],brain:bfloat16[?]"
    return Written([path], samples, {"fields": f"*,{types}"})


def mds(folder: Path) -> Written:
    """A shard after the layout: MosaicML's package needs PyTorch; see ``mds_golden``."""
    columns: dict[str, tuple[str, int | None, Callable[[int], bytes]]] = {
        "image": ("jpeg", None, lambda row: BLOBS[row]),
        "text": ("str", None, lambda row: TEXTS[row].encode()),
        "label": ("int", 8, lambda row: LABELS[row].tobytes()),
        "half": ("float16", 2, lambda row: HALVES[row].tobytes()),
        "exact": ("str_int", None, lambda row: str(10**18 - row).encode()),
        "ratio": ("str_float", None, lambda row: repr(row / 3).encode()),
        "meta": ("json", None, lambda row: json.dumps({"row": row, "a": TEXTS[row]}).encode()),
        "fixed": ("ndarray:float32:2,3,4", 96, lambda row: VOLUMES[row].tobytes()),
        "shaped": (
            "ndarray:int16",
            None,
            lambda row: bytes([2 << 2 | 0, row + 1, 3]) + grid(row).tobytes(),
        ),
        "dynamic": (
            "ndarray",
            None,
            lambda row: (
                bytes([34, 1 << 2 | 1]) + struct.pack("<H", row + 1) + vector(row).tobytes()
            ),
        ),
    }

    def grid(row: int) -> Any:
        return np.arange(3 * row + 3, dtype=np.int16).reshape(row + 1, 3)

    def vector(row: int) -> Any:
        return np.arange(row + 1, dtype=np.float32)

    rows = [[make(row) for _, _, make in columns.values()] for row in range(COUNT)]
    write_mds(folder, {name: column[:2] for name, column in columns.items()}, rows)
    samples = [
        {
            "image": BLOBS[row],
            "text": TEXTS[row],
            "label": LABELS[row],
            "half": HALVES[row],
            "exact": np.int64(10**18 - row),
            "ratio": np.float64(row / 3),
            "meta": json.dumps({"row": row, "a": TEXTS[row]}),
            "fixed": VOLUMES[row],
            "shaped": grid(row),
            "dynamic": vector(row),
        }
        for row in range(COUNT)
    ]
    return Written([folder], samples)


MDS_GOLDEN = (
    "eNpjYmBgqGRkYPjIxMCwmJWBoVopOT+nNDcvPjUvOT8lMy+9WMlKIVopLyWxqCix0iotJz+xxNjIykjHSElHQam4"
    "pAhKxWfmlYCYUIUgZlJlSWoxiAGUMjRDkrSCC2QV5+cpxQIZUEvzEnNTIRYm5VeAFCQnFpRkAtUAmakViclgK9KL"
    "MlPAxuYmpqeCGDmJSak5YEZmHlggN7UkEdnY4swqiLGGZjoKeaU5OdhII2QuRHNuQVFqcTHIfiuonFJaflFuYgmQ"
    "r5SbAvZcRmJxBtTNxRmJhmBrQfbF52TmZoIUmpkbGlhYmJkAxctSi6CmGdUCw51BAIiNGBnAgAWIORgwgaEBKuDg"
    "1GEEamFkYmZhZWPn4OTi5uHl4xcQFBIWERUTl5CUkpaRlZNXUFRSVlFVU9fQ1NLW0dXTNzA0MjYxNTO3sLSytrG1"
    "s3dwdHJ2cXVz9/D08vbx9fMPCAwKDgkNC4+IjIqOiY2LT0hMSk5JTUvPyMzKzsnNyy8oLCouKS0rr6isqq6pratv"
    "aGxqbmlta+/o7Oru6e3rnzBx0uQpU6dNnzFz1uw5c+fNX7Bw0eIlS5ctX7Fy1eo1a9et37Bx0+YtW7dt37Fz1+49"
    "e/ftP3Dw0OEjR48dP3Hy1OkzZ8+dv3Dx0uUrV69dv3Hz1u07d+/df/Dw0eMnT589f/Hy1es3b9+9//Dx0+cvX799"
    "//Hz1+8/f//9J8X/wLBlBCXsTGC4G9RyQcM9DpjggYiBDRHu9sg4vejwtsPzU4sU0GPAEBQDTKMxMOp/mvif4f//"
    "/yyg5AVNsYa1AAoeGBE="
)
"""A shard that MDSWriter of mosaicml-streaming 0.13 wrote, compressed with zlib, in Base64."""


def mds_golden(folder: Path) -> Written:
    data = zlib.decompress(base64.b64decode(MDS_GOLDEN))
    (folder / "shard.00000.mds").write_bytes(data)
    at = data.index(b"{")
    shard = json.JSONDecoder().raw_decode(data[at:].decode("latin-1"))[0]
    shard |= {"raw_data": {"basename": "shard.00000.mds", "bytes": len(data)}, "samples": 2}
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    samples = [  # as StreamingDataset reads them
        {
            "box": np.full((2, 2), row / 2, np.float32),
            "caption": "größer \0"[: 8 * row],
            "exact": np.int64(10**15 + row),
            "grid": np.arange(300 * (row + 1), dtype=np.uint8).reshape(300, row + 1),
            "image": b"\0\xff" * row,
            "label": np.int16(-row),
            "line": np.arange(row + 1, dtype=np.int16),
            "meta": json.dumps({"i": row}),
        }
        for row in range(2)
    ]
    return Written([folder], samples)


# ---- tables --------------------------------------------------------------------------------------


def table() -> Any:
    pa = pytest.importorskip("pyarrow")
    nested = [[list(map(float, line)) for line in grid] for grid in GRIDS]
    weights = [None, 1.5, -0.0, None, 2.5]
    return pa.table(
        {
            "image": pa.array([{"bytes": data, "path": None} for data in BLOBS]),
            "mask": pa.array(BLOBS[::-1], pa.large_binary()),
            "caption": pa.array(TEXTS),
            "kind": pa.array(["a", "b", "a", "", "b"]).dictionary_encode(),
            "label": pa.array(LABELS),
            "flag": pa.array(FLAGS),
            "half": pa.array(HALVES),
            "weight": pa.array(weights, pa.float32()),
            "vector": pa.array([vector.tolist() for vector in VECTORS], pa.list_(pa.float32())),
            "holes": pa.array([[None, 1.0], [], [2.0], [None], [3.0]], pa.list_(pa.float64())),
            "box": pa.array(VOLUMES[:, 0, 0].tolist(), pa.list_(pa.float32(), 4)),
            "grid": pa.array(nested, pa.large_list(pa.list_(pa.float32(), 3))),
            "objects": pa.array([{"id": list(range(row)), "n": row} for row in range(COUNT)]),
        }
    )


def table_samples(read: Any) -> list[Sample]:
    """Return the samples that pyarrow reads from ``table``."""
    rows = read.to_pylist()
    return [
        {
            "image": row["image"]["bytes"],
            "mask": row["mask"],
            "caption": row["caption"],
            "kind": row["kind"],
            "label": np.int64(row["label"]),
            "flag": np.bool_(row["flag"]),
            "half": np.float16(row["half"]),
            "weight": np.float32(np.nan if row["weight"] is None else row["weight"]),
            "vector": np.array(row["vector"], np.float32),
            "holes": np.array(row["holes"], np.float64),
            "box": np.array(row["box"], np.float32),
            "grid": np.array(row["grid"], np.float32).reshape(-1, 3),
            "objects.id": np.array(row["objects"]["id"], np.int64),
            "objects.n": np.int64(row["objects"]["n"]),
        }
        for row in rows
    ]


def parquet(folder: Path) -> Written:
    pq = pytest.importorskip("pyarrow.parquet")
    paths = [folder / "a.parquet", folder / "b.parquet"]
    for path, first in zip(paths, (0, 2), strict=True):
        pq.write_table(table().slice(first, 2 + first), path, row_group_size=2)
    return Written(paths, [row for path in paths for row in table_samples(pq.read_table(path))])


def arrow(folder: Path) -> Written:
    feather = pytest.importorskip("pyarrow.feather")
    feather.write_feather(table(), folder / "x.feather", chunksize=3)
    return Written([folder / "x.feather"], table_samples(feather.read_table(folder / "x.feather")))


def huggingface(folder: Path) -> Written:
    hugging = pytest.importorskip("datasets")
    hugging.disable_progress_bars()
    features = hugging.Features(
        {
            "image": hugging.Image(decode=False),
            "mask": hugging.Image(decode=False),
            "matrix": hugging.Array2D((3, 4), "float32"),
            "tokens": hugging.Sequence(hugging.Value("int32")),
            "label": hugging.ClassLabel(names=["cat", "dog"]),
        }
    )
    made = hugging.Dataset.from_list(
        [
            {
                "image": {"bytes": BLOBS[row], "path": None},
                "mask": {"bytes": BLOBS[-row], "path": f"{row}.png"},
                "matrix": VOLUMES[row, 0].tolist(),
                "tokens": list(range(row)),
                "label": row % 2,
            }
            for row in range(COUNT)
        ],
        features,
    )
    made.save_to_disk(str(folder / "saved"))
    samples = [
        {
            "image": row["image"]["bytes"],
            "mask": row["mask"]["bytes"],
            "matrix": np.array(row["matrix"], np.float32),
            "tokens": np.array(row["tokens"], np.int32),
        }
        for row in hugging.load_from_disk(str(folder / "saved"))
    ]
    return Written([folder / "saved"], samples, {})


# ---- arrays --------------------------------------------------------------------------------------

ARRAYS = {"volume": VOLUMES, "wave": WAVES, "label": LABELS, "half": HALVES, "big": BIG}
REAL = {"volume": VOLUMES, "label": LABELS}


def hdf5(folder: Path) -> Written:
    h5py = pytest.importorskip("h5py")
    path = folder / "x.h5"
    with h5py.File(path, "w") as file:
        for name, values in {**ARRAYS, "flag": FLAGS, "code": np.array(BLOBS, "S4")}.items():
            file.create_dataset(f"train/{name}", data=values, chunks=(2, *values.shape[1:]))
        file["train"].create_dataset("text", data=NO_NULS, dtype=h5py.string_dtype())
        vector = file["train"].create_dataset("vector", (COUNT,), h5py.vlen_dtype(np.float32))
        for row in range(COUNT):
            vector[row] = VECTORS[row]
        file["version"] = 3
    with h5py.File(path) as file:
        arrays = {name: item[...] for name, item in file["train"].items()}
        arrays["text"] = file["train/text"].asstr()[...]
    return Written([path], rows(arrays))


def hdf5_groups(folder: Path) -> Written:
    """A group is a sample, and each file has some; shapes differ."""
    h5py = pytest.importorskip("h5py")
    paths = [folder / "a.h5", folder / "b.h5"]
    for path, group in zip(paths, (range(3), range(3, COUNT)), strict=True):
        with h5py.File(path, "w") as file:
            for row in group:
                file[f"s{row}/grid"] = GRIDS[row]
                file[f"s{row}/volume"] = VOLUMES[row].astype(">f4")
                file[f"s{row}/target"] = LABELS[row]
                file[f"s{row}/name"] = NO_NULS[row]
    samples = []
    for path in paths:
        with h5py.File(path) as file:
            samples += [{name: item[()] for name, item in group.items()} for group in file.values()]
    for sample in samples:
        sample["name"] = sample["name"].decode()
    return Written(paths, samples, {"fields": "*", "samples": "groups"})


def hdf5_compound(folder: Path) -> Written:
    """The members of a compound type are the fields, also without the option."""
    h5py = pytest.importorskip("h5py")
    path = folder / "x.h5"
    pose = np.dtype([("x", ">f8"), ("id", "S4")])
    members = [
        ("volume", VOLUMES.dtype, VOLUMES.shape[1:]),
        ("label", LABELS.dtype, LABELS.shape[1:]),
        ("text", h5py.string_dtype()),
        ("vector", h5py.vlen_dtype(np.float32)),
        ("pose", pose),
    ]
    table = np.zeros(COUNT, np.dtype(members))
    table["volume"], table["label"], table["text"] = VOLUMES, LABELS, NO_NULS
    table["pose"]["x"], table["pose"]["id"] = np.arange(COUNT), np.array(BLOBS, "S4")
    for row in range(COUNT):
        table["vector"][row] = np.asarray(VECTORS[row], np.float32)
    with h5py.File(path, "w") as file:
        file.create_dataset("events", data=table, chunks=(2,))
    with h5py.File(path) as file:
        read = file["events"][...]
    arrays = {name: read[name] for name in ("volume", "label", "vector")}
    arrays["text"] = np.array([text.decode() for text in read["text"]], object)
    arrays |= {f"pose.{name}": read["pose"][name] for name in pose.names}
    return Written([path], rows(arrays), {})


def netcdf(folder: Path) -> Written:
    netcdf = pytest.importorskip("netCDF4")
    path = folder / "x.nc"
    arrays = {**REAL, "big": BIG}
    with netcdf.Dataset(path, "w") as file:
        for name, values in {**arrays, "text": NO_NULS}.items():
            axes = [f"n{length}" for length in values.shape]
            for axis, length in zip(axes, values.shape, strict=True):
                if axis not in file.dimensions:
                    file.createDimension(axis, length)
            kind = str if name == "text" else values.dtype
            variable = file.createVariable(
                name, kind, axes, endian="native" if name != "big" else "big"
            )
            variable[...] = values
    with netcdf.Dataset(path) as file:
        file.set_auto_mask(False)
        read = {name: variable[...] for name, variable in file.variables.items()}
    return Written([path], rows(read))


def netcdf_classic(folder: Path) -> Written:
    netcdf = pytest.importorskip("netCDF4")
    path = folder / "x.nc"
    with netcdf.Dataset(path, "w", format="NETCDF3_CLASSIC") as file:
        for axis, length in zip("nzyx", VOLUMES.shape, strict=True):
            file.createDimension(axis, length if axis != "n" else None)
        file.createVariable("volume", "f4", tuple("nzyx"))[:] = VOLUMES
        file.createVariable("label", "i4", ("n",))[:] = LABELS
    with netcdf.Dataset(path) as file:
        file.set_auto_mask(False)
        read = {name: variable[...] for name, variable in file.variables.items()}
    return Written([path], rows(read))


def zarr(folder: Path) -> Written:
    zarr = pytest.importorskip("zarr")
    root = zarr.open_group(folder / "x.zarr", mode="w")
    for name, values in ARRAYS.items():
        array = root.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=(2, *values.shape[1:]),
            config={"write_empty_chunks": True},
        )
        array[...] = values
    text = root.create_array("text", shape=(COUNT,), dtype=str)
    text[...] = np.array(TEXTS)
    read = zarr.open_group(folder / "x.zarr", mode="r")
    return Written([folder / "x.zarr"], rows({name: array[...] for name, array in read.arrays()}))


def adios2(folder: Path) -> Written:
    adios = pytest.importorskip("adios2", exc_type=ImportError)
    path = folder / "x.bp"
    with adios.Stream(str(path), "w") as stream:
        for row in range(COUNT):
            stream.begin_step()
            for name, values in (("volume", VOLUMES[row]), ("wave", WIDE_WAVES[row])):
                stream.write(name, values, values.shape, [0] * values.ndim, values.shape)
            stream.write("label", np.array(LABELS[row]))
            stream.write("text", NO_NULS[row])
            stream.end_step()
    samples = []
    with adios.Stream(str(path), "r") as stream:
        for _ in stream.steps():
            read = {name: stream.read(name) for name in ("volume", "wave", "label", "text")}
            samples.append({**read, "label": np.int64(read["label"])})
    return Written([path], samples)


def npz(folder: Path) -> Written:
    np.savez_compressed(
        folder / "x.npz", **{**ARRAYS, "flag": FLAGS, "wide": np.asfortranarray(VOLUMES)}
    )
    with np.load(folder / "x.npz") as read:
        return Written([folder / "x.npz"], rows(dict(read)))


def npz_files(folder: Path) -> Written:
    """A file is a sample, as of segmentation: an image and its mask."""
    paths = [folder / f"case_{row}.npz" for row in range(COUNT)]
    samples = []
    for row, path in enumerate(paths):
        text = {"word": np.array(TEXTS[row]), "code": np.array(BLOBS[row])}
        np.savez(path, x=VOLUMES[row][:, : row % 3], y=GRIDS[row], z=WAVES[row].T, **text)
        with np.load(path) as read:
            strings = {name: read[name].item() for name in text}
            samples.append({**{name: read[name] for name in "xyz"}, **strings})
    return Written(paths, samples, {"fields": "*", "samples": "groups"})


def npy(folder: Path) -> Written:
    np.save(folder / "images.npy", np.asfortranarray(VOLUMES))
    np.save(folder / "labels.npy", BIG)
    samples = rows(
        {name: np.load(folder / f"{name}s.npy", mmap_mode="r") for name in ("image", "label")}
    )
    options = {"fields": "image=images.npy,label=labels.npy"}
    return Written([folder / "images.npy"], samples, options)


SOURCES: dict[str, Callable[[Path], Written]] = {
    write.__name__: write
    for write in (
        webdataset,
        tfrecord,
        mds,
        mds_golden,
        parquet,
        arrow,
        huggingface,
        hdf5,
        hdf5_groups,
        hdf5_compound,
        netcdf,
        netcdf_classic,
        zarr,
        adios2,
        npz,
        npz_files,
        npy,
    )
}


def open_written(written: Written) -> Any:
    paths = [str(path) for path in written.paths]
    return open_source(paths, format_name=written.format_name, options=written.options)


@pytest.mark.parametrize("name", SOURCES)
def test_fields_are_what_the_source_s_own_reader_gives(
    volume: Volume, tmp_path: Path, name: str
) -> None:
    written = SOURCES[name](tmp_path)
    source = open_written(written)
    expected_bytes, expected_count = source.sample_bytes, source.sample_count
    report = import_dataset(volume, source, "n")
    source.close()
    assert expected_count in (None, len(written.samples))
    with volume["n"] as dataset:
        assert list(dataset.fields) == list(dict.fromkeys(dataset.fields))
        order = np.argsort(dataset.paths())
        assert len(order) == len(written.samples)
        for index, want in zip(order.tolist(), written.samples, strict=True):
            got = dataset.sample(index)
            assert sorted(got) == sorted(want)
            for field_name, value in want.items():
                check(got[field_name], value, f"{name} {index} {field_name}")
        if not any("?" in kind for kind in dataset.fields.values()):
            assert expected_bytes in (None, report.sample_bytes)


def check(got: Any, want: Any, where: str) -> None:
    """Check that two values are the same, in type, shape and every bit."""
    if isinstance(want, str):
        assert got == want, where
        return
    if isinstance(want, bytes):
        assert bytes(got) == want, where
        return
    want = np.asarray(want)
    assert got.dtype.newbyteorder("=") == want.dtype.newbyteorder("="), where
    assert got.shape == want.shape, where
    native = got.dtype.newbyteorder("=")
    assert got.astype(native).tobytes() == want.astype(native).tobytes(), where
