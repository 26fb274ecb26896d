"""Types of elements: those that numpy lacks, structures, elements that are arrays; and paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlfs.errors import DlfsError, UsageError
from dlfs.fields.arrays import ArrayForm
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.volume.volume import Volume
from tests.unit.ingest.array_writers import rows_of, take, take_all, write_hdf5, write_zarr

OPAQUE = np.arange(24, dtype="<u2").reshape(4, 3, 2).view("V2")


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".h5", ".zarr"])
def test_elements_that_numpy_lacks_keep_their_bytes_and_shape(
    tmp_path: Path, volume: Volume, suffix: str
) -> None:
    """As ``np.save`` writes bfloat16 and float8 of ml_dtypes."""
    path = tmp_path / f"a{suffix}"
    if suffix == ".npy":
        np.save(path, OPAQUE)
    elif suffix == ".npz":
        np.savez(path, x=OPAQUE)
    elif suffix == ".h5":
        write_hdf5(path, {"x": OPAQUE}, chunks=(2, 3, 2), compression="gzip")
    else:
        write_zarr(path, {"x": OPAQUE}, layout=2)
    source = open_source(path)
    assert dict(source.skipped) == {}
    import_dataset(volume, source, "n")
    source.close()
    with volume["n"] as dataset:
        arrays = dataset.read_arrays(range(4))
        assert arrays.dtype == np.dtype("V2")
        assert arrays.tobytes() == OPAQUE.tobytes()
        assert arrays.shape == OPAQUE.shape
    with pytest.raises(DlfsError, match=r"expected rows of numbers, times or text, got .*V2"):
        open_source(path, options={"fields": f"f={'a.npy' if suffix == '.npy' else 'x'}"})


def test_structures_and_empty_types_have_no_form() -> None:
    for dtype in (np.dtype("i4,f4"), np.dtype("V0"), np.dtype(object), np.dtype(("V2", (3,)))):
        with pytest.raises(UsageError, match="expected a dtype of bool, numbers, times, or"):
            ArrayForm.of(dtype, (2,))
    assert ArrayForm.of("|V2", (2,)).texts == ("|V2", "2")


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3"])
def test_zarr_types_that_the_package_lacks_are_named(tmp_path: Path, name: str) -> None:
    for layout, key, entry in ((2, ".zarray", "dtype"), (3, "zarr.json", "data_type")):
        path = tmp_path / f"{layout}.zarr"
        write_zarr(path, {"x": np.ones((4, 2), "u2")}, layout=layout)
        metadata = json.loads((path / "x" / key).read_text())
        metadata[entry] = name
        (path / "x" / key).write_text(json.dumps(metadata))
        with pytest.raises(DlfsError, match=rf"{layout}\.zarr: .*x.*{name}"):
            open_source(path)


def test_structures_are_reported(tmp_path: Path) -> None:
    values = np.zeros(3, [("a", "i4"), ("b", "f4", (2,))])
    np.save(tmp_path / "a.npy", values)
    source = open_source(tmp_path / "a.npy")
    assert len(take(source)) == 3  # type: ignore[arg-type]
    (reason,) = source.skipped
    assert reason.startswith("type and shape of an array ([('a', '<i4'), ('b', '<f4', (2,))], 3)")
    np.savez(tmp_path / "b.npz", x=values)
    assert dict(open_source(tmp_path / "b.npz", options={"samples": "groups"}).skipped) == {}


# ---- HDF5: elements that are arrays --------------------------------------------------------------


def write_array_type(path: Path, values: Any, rank: int, **options: Any) -> None:
    h5py = pytest.importorskip("h5py")
    kind = np.dtype((values.dtype, values.shape[rank:]))
    with h5py.File(path, "w") as file:
        file.create_dataset("x", values.shape[:rank], kind, **options)[...] = values


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunks": (3,)},
        {"chunks": (3,), "compression": "gzip", "shuffle": True},
        {"chunks": (3,), "compression": "lzf", "fletcher32": True},
    ],
)
def test_hdf5_elements_that_are_arrays_have_further_dimensions(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    values = np.arange(8 * 2 * 5, dtype=">i4").reshape(8, 2, 5)
    path = tmp_path / "a.h5"
    write_array_type(path, values, 1, **options)
    for buffer_bytes in (100, 1 << 20):
        source = open_source(path)
        source.buffer_bytes = buffer_bytes
        got = take_all(source)  # type: ignore[arg-type]
        assert {name: data for name, data, _ in got} == rows_of("x", values)
        assert {str(found["dlfs:shape"]) for _, _, found in got} == {"2,5"}
        assert {str(found["dlfs:dtype"]) for _, _, found in got} == {">i4"}
    whole = take_all(open_source(path, options={"samples": "arrays"}))  # type: ignore[arg-type]
    assert [(data, found["dlfs:shape"]) for _, data, found in whole] == [
        (values.tobytes(), "8,2,5")
    ]


def test_hdf5_chunks_of_arrays_that_were_never_written(tmp_path: Path) -> None:
    values = np.arange(12, dtype="f4").reshape(4, 3)
    path = tmp_path / "a.h5"
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", (8,), np.dtype(("f4", (3,))), chunks=(4,))
        made[:4] = values
    with pytest.raises(DlfsError, match=r"x \(float32, 8x3\): expected 2 chunks, got 1"):
        open_source(path)
    got = take(open_source(path, options={"missing": "fill"}))  # type: ignore[arg-type]
    assert got == rows_of("x", np.concatenate([values, np.zeros((4, 3), "f4")]))


def test_hdf5_a_single_element_that_is_an_array(tmp_path: Path) -> None:
    values = np.arange(40, dtype="i2").reshape(8, 5)
    path = tmp_path / "a.h5"
    write_array_type(path, values, 0)
    source = open_source(path)
    source.buffer_bytes = 30
    assert take(source) == rows_of("x", values)  # type: ignore[arg-type]


def test_hdf5_members_of_one_element_that_are_arrays(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    value = np.zeros((), [("a", "i2", (8,)), ("b", "f4", (8, 2))])
    value["a"], value["b"] = np.arange(8), np.arange(16).reshape(8, 2)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = value
    source = open_source(tmp_path / "a.h5", options={"fields": "a=x/a,b=x/b"})
    source.buffer_bytes = 20
    got = [*take(source).values()]  # type: ignore[arg-type]
    for row, data in enumerate(got):
        assert data[:2] == value["a"][row : row + 1].tobytes()
        assert data[4:] == value["b"][row].tobytes()


def test_hdf5_external_rows_of_a_compound_type(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    values = np.zeros(9, [("a", "i2"), ("b", "f8")])
    values["a"], values["b"] = np.arange(9), np.arange(9) / 4
    (tmp_path / "raw").write_bytes(values.tobytes())
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (9,), values.dtype, external=[(b"raw", 0, values.nbytes)])
    source = open_source(tmp_path / "a.h5", options={"fields": "a=x/a,b=x/b"})
    source.buffer_bytes = 20
    got = [*take(source).values()]  # type: ignore[arg-type]
    assert [np.frombuffer(data, "i2", 1).item() for data in got] == values["a"].tolist()
    assert [np.frombuffer(data, "f8", 1, 8).item() for data in got] == values["b"].tolist()


# ---- paths ---------------------------------------------------------------------------------------


def npz(path: Path, *names: str) -> Path:
    np.savez(path, **{name: np.ones((3, 2)) for name in names})
    return path


def test_groups_in_groups_are_named(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", "g/x", "g/h/y", "z")
    with pytest.raises(
        UsageError,
        match=r"import .*a\.npz: g/h/y: expected samples of different paths, got g/h; g, of "
        r"g/x of .*a\.npz, is a sample and cannot have samples below it",
    ):
        open_source(path, options={"samples": "groups"})
    assert len(take(open_source(path))) == 9  # type: ignore[arg-type]


def test_two_samples_of_one_path_are_named(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", "x", "y", "a/x", "a/y")
    with pytest.raises(UsageError, match=r"a\.npz: .*got a; a, of .*, has this path too"):
        open_source(path, options={"fields": "x,y"})
    path = npz(tmp_path / "b.npz", "x", "x/00000002/y", "x/3", "x/00000003")
    with pytest.raises(UsageError, match=r"b\.npz: x/00000002/y: .*; x, of x of .* has a row of"):
        open_source(path)
    path = npz(tmp_path / "c.npz", "x", "x/3", "x/00000003")
    assert len(take(open_source(path))) == 9  # type: ignore[arg-type]
    path = npz(tmp_path / "d.npz", "x", "x/00000001")
    with pytest.raises(UsageError, match=r"d\.npz: x/00000001: .*is a sample and cannot"):
        open_source(path, options={"samples": "arrays"})


def test_paths_of_several_files_are_named(tmp_path: Path, volume: Volume) -> None:
    one, two = npz(tmp_path / "a.npz", "x"), npz(tmp_path / "a.b.npz", "x")
    source = open_source([one, two])
    import_dataset(volume, source, "n")
    source.close()
    with volume["n"] as dataset:
        assert len(dataset) == 6


def test_links_are_counted_with_their_names(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.ones((2, 2))
        file["g/soft"] = h5py.SoftLink("/nothing")
        file["g/outside"] = h5py.ExternalLink("none.h5", "/x")
        file["g/good"] = h5py.SoftLink("/x")
    source = open_source(tmp_path / "a.h5")
    assert dict(source.skipped) == {
        "soft link g/good to /x": 1,
        "soft link g/soft to /nothing": 1,
        "external link g/outside to /x of none.h5": 1,
    }
    with pytest.raises(DlfsError, match=r"a\.h5: expected g/soft .*soft link g/soft to /nothing"):
        open_source(tmp_path / "a.h5", options={"select": "g/soft"})
