"""Record batches are found by their headers, and a stream is read without some of them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlfs.ingest.tables.ipc_batches import Without, find_batches
from tests.support.files import flip_bit

pa = pytest.importorskip("pyarrow")


def write(path: Path, make: Callable[..., Any], compression: str | None) -> Any:
    """Write a table with a dictionary, and return it."""
    text = pa.array([f"t{number % 3}" for number in range(25)]).dictionary_encode()
    table = pa.table({"number": range(25), "text": text})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with make(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=10)
    return table


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("is_file", [True, False], ids=["file", "stream"])
def test_batches_have_their_rows(tmp_path: Path, is_file: bool, compression: str | None) -> None:
    path = tmp_path / "x.arrow"
    write(path, pa.ipc.new_file if is_file else pa.ipc.new_stream, compression)
    with path.open("rb") as file:
        found = find_batches(file.fileno(), is_file=is_file)
    assert found is not None
    assert [batch.row_count for batch in found] == [10, 10, 5]


@pytest.mark.parametrize("left_out", [[0], [1], [0, 1], [2], [0, 1, 2]])
def test_a_stream_is_read_without_some_batches(tmp_path: Path, left_out: list[int]) -> None:
    path = tmp_path / "x.arrow"
    table = write(path, pa.ipc.new_stream, None)
    with path.open("rb") as file:
        found = find_batches(file.fileno(), is_file=False) or []
        rest = io.BufferedReader(Without(file.fileno(), [found[number] for number in left_out]), 64)
        with pa.ipc.open_stream(pa.PythonFile(rest, mode="r")) as reader:
            got = reader.read_all()
    kept = [table.slice(number * 10, 10) for number in range(3) if number not in left_out]
    assert got.to_pylist() == [row for part in kept for row in part.to_pylist()]


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "stream"])
def test_any_bit_may_be_wrong(tmp_path: Path, is_file: bool) -> None:
    path = tmp_path / "x.arrow"
    write(path, pa.ipc.new_file if is_file else pa.ipc.new_stream, None)
    for offset in range(path.stat().st_size):
        flip_bit(path, offset, offset % 8)
        with path.open("rb") as file:
            find_batches(file.fileno(), is_file=is_file)
        flip_bit(path, offset, offset % 8)


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "stream"])
def test_a_cut_file_does_not_tell_its_batches(tmp_path: Path, is_file: bool) -> None:
    path = tmp_path / "x.arrow"
    write(path, pa.ipc.new_file if is_file else pa.ipc.new_stream, None)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with path.open("rb") as file:
            assert not find_batches(file.fileno(), is_file=is_file)
