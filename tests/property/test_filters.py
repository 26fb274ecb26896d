"""Damages chunks of HDF5 datasets behind every filter: an error, or what is read the same twice.

A chunk that is cut gives its values, if nothing of them is missing, or an error that names it. It
never gives other values: the library and some of its plug-ins would take them from memory that
nobody wrote. A chunk whose bits are flipped may have other values, but the same in two processes.

``DLFS_TEST_EXAMPLES`` is the number of examples of each test, 15 by default.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlfs.errors import DlfsError
from tests.property.test_array_imports import EXAMPLES, few, opened, outcome
from tests.unit.ingest.array_writers import rows_of, take

h5py = pytest.importorskip("h5py")

Plan = Any
Setup = Callable[[Plan, st.DrawFn], None]


def szip(plan: Plan, draw: Callable[[Any], Any]) -> None:
    masks = [h5py.h5z.SZIP_NN_OPTION_MASK, h5py.h5z.SZIP_EC_OPTION_MASK]
    plan.set_szip(draw(st.sampled_from(masks)), draw(st.sampled_from([2, 8, 10, 16, 32])))


def scaleoffset(plan: Plan, draw: Callable[[Any], Any]) -> None:
    plan.set_scaleoffset(h5py.h5z.SO_INT, 0)


def nbit(plan: Plan, draw: Callable[[Any], Any]) -> None:
    plan.set_filter(h5py.h5z.FILTER_NBIT, 0, ())


def plugin(name: str, **options: Any) -> Callable[..., None]:
    def add(plan: Plan, draw: Callable[[Any], Any]) -> None:
        package = pytest.importorskip("hdf5plugin")
        made = getattr(package, name)(**options)
        plan.set_filter(
            made["compression"], h5py.h5z.FLAG_OPTIONAL, tuple(made["compression_opts"])
        )

    return add


FILTERS: dict[str, Callable[..., None]] = {
    "szip": szip,
    "scaleoffset": scaleoffset,
    "nbit": nbit,
    "zstd": plugin("Zstd"),
    "lz4": plugin("LZ4"),
    "lz4 in blocks": plugin("LZ4", nbytes=64),
    "bitshuffle": plugin("Bitshuffle", cname="none"),
    "bitshuffle lz4": plugin("Bitshuffle", nelems=16),
    "bitshuffle zstd": plugin("Bitshuffle", nelems=16, cname="zstd"),
    "blosc": plugin("Blosc"),
    "blosc2": plugin("Blosc2"),
    "bzip2": plugin("BZip2"),
}

AROUND = {
    "deflate": lambda plan: plan.set_deflate(4),
    "shuffle": lambda plan: plan.set_shuffle(),
    "fletcher32": lambda plan: plan.set_fletcher32(),
}


@contextmanager
def written(
    kind: str, draw: Callable[[Any], Any], after: str = ""
) -> Iterator[tuple[Path, npt.NDArray[Any]]]:
    """Write a dataset of chunks behind a filter, and perhaps another one after it."""
    types = ["<i4", "<u2", "|u1", "<i8"] if kind != "nbit" else ["<i4", "<u2"]
    dtype = np.dtype(draw(st.sampled_from(types)))
    rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 41))
    if kind == "szip":  # its blocks are not longer than a chunk
        rows, width = 4 * rows, width + 8
    most = draw(st.sampled_from([1, 100, 1 << 15 if dtype.itemsize > 1 else 255]))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    values = random.integers(0, most, (3 * rows, width), dtype, endpoint=True)
    values[: draw(st.integers(0, 3 * rows))] = 0
    stored = h5py.h5t.py_create(dtype).copy()
    if kind == "nbit" and draw(st.booleans()):
        stored.set_precision(16 if dtype.itemsize == 2 else 23)
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_chunk((rows, width))
    FILTERS[kind](plan, draw)
    if after:
        AROUND[after](plan)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.h5"
        with h5py.File(path, "w") as file:
            space = h5py.h5s.create_simple(values.shape)
            made = h5py.h5d.create(file.id, b"x", stored, space, plan)
            made.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
        yield path, values


def change_chunk(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Store other bytes in place of those of the second chunk."""
    with h5py.File(path, "r+") as file:
        x = file["x"]
        mask, data = x.id.read_direct_chunk((x.chunks[0], 0))
        x.id.write_direct_chunk((x.chunks[0], 0), change(data), mask)


def outcome_here(path: Path) -> dict[str, bytes] | str:
    """Return the samples of a source, or its error."""
    try:
        return take(opened(path))  # type: ignore[arg-type]
    except DlfsError as error:
        return str(error)


def run(check: Callable[..., None], kind: str) -> None:
    """Run a check; in a process of its own if this one has netCDF4.

    netCDF4 sets HDF5_PLUGIN_PATH, so that h5py would take its plug-in of Blosc, which uses the HDF5
    library of netCDF4.
    """
    if kind != "blosc" or "netCDF4" not in sys.modules:
        check(kind=kind)
        return
    code = f"from {__name__} import {check.__name__} as check; check(kind={kind!r})"
    plain = {name: value for name, value in os.environ.items() if name != "HDF5_PLUGIN_PATH"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=plain)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", FILTERS)
def test_a_chunk_that_is_cut_has_its_values_or_an_error(kind: str) -> None:
    run(check_cuts, kind)


@settings(few, max_examples=max(2, EXAMPLES // 3))
@given(data=st.data())
def check_cuts(kind: str, data: st.DataObject) -> None:
    after = data.draw(st.sampled_from(["", "", "deflate"]))
    with written(kind, data.draw, after) as (path, values):
        assert take(opened(path)) == rows_of("x", values)  # type: ignore[arg-type]
        for part in data.draw(st.lists(st.floats(0, 1), min_size=1, max_size=20)):
            change_chunk(path, lambda stored, part=part: stored[: max(1, int(part * len(stored)))])
            got = outcome_here(path)
            if isinstance(got, str):
                assert f"import {path}: x" in got
            else:
                assert got == rows_of("x", values)


@pytest.mark.parametrize("kind", FILTERS)
def test_a_chunk_with_other_bits_gives_the_same_twice(kind: str) -> None:
    run(check_flips, kind)


@settings(few, max_examples=max(1, EXAMPLES // 10))
@given(data=st.data())
def check_flips(kind: str, data: st.DataObject) -> None:
    with written(kind, data.draw) as (path, _):
        at, bit = data.draw(st.floats(0, 1, exclude_max=True)), data.draw(st.integers(0, 7))

        def flip(stored: bytes) -> bytes:
            content = bytearray(stored)
            content[int(at * len(stored))] ^= 1 << bit
            return bytes(content)

        change_chunk(path, flip)
        first, second = outcome(path), outcome(path)
    assert first == second
    if isinstance(first, str):
        assert str(path) in first
