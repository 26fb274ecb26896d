"""Tests of sources that are FIFOs, sockets or devices, or have some in them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from dlfs.errors import DlfsError, UsageError
from dlfs.ingest.importer import open_source


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize("make", [fifo, unix_socket])
@pytest.mark.parametrize("name", ["a.h5", "a.tar", "a.npy", "a.parquet", "a.tfrecord", "a"])
def test_a_source_that_is_no_file_is_refused(
    tmp_path: Path, make: Callable[[Path], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path(name))
    with pytest.raises(UsageError, match=rf"import {name}: expected a file .* got a (FIFO|socket)"):
        open_source(name)
    with pytest.raises(UsageError, match="got a device"):
        open_source("/dev/zero", format_name="tar")


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (["state.json", "dataset_info.json"], "state.json"),
        (["md.idx", "data.0"], "md.idx"),
        (["data.mdb"], "data.mdb"),
        (["index.json", "shard.0.mds"], "index.json"),
    ],
)
def test_a_folder_with_a_fifo_is_refused(tmp_path: Path, files: list[str], name: str) -> None:
    for file in files:
        (tmp_path / file).write_text("")
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(DlfsError, match=rf"import {tmp_path}/{name}: "):
        open_source(tmp_path)
