"""Shared parts of the tests of sources: read a source, read a volume, check a refused import."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard
from typer.testing import CliRunner

import dlfs
from dlfs.cli.commands import app
from dlfs.errors import DlfsError
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.ingest.source import Layout, Source
from dlfs.volume.volume import Volume
from tests.support.volumes import read_dataset

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".tar": bytes,
    ".tar.gz": gzip.compress,
    ".tgz": gzip.compress,
    ".tar.bz2": bz2.compress,
    ".tar.xz": lzma.compress,
    ".tar.zst": zstandard.ZstdCompressor().compress,
}
"""By the end of an archive's name."""

Taken = dict[str, tuple[bytes, dict[str, Any]]]
"""Bytes and attributes, by path."""


def take(source: Source, *, layout: Layout = "path", seed: int = 0) -> Taken:
    """Everything that a source gives, in its order; no file of it stays open, also after errors."""
    got: Taken = {}
    try:
        with closing(source.blocks(layout=layout, seed=seed)) as blocks:
            for block in blocks:
                columns = {name: values.tolist() for name, values in block.attributes.items()}
                spans = zip(
                    block.paths, block.offsets.tolist(), block.lengths.tolist(), strict=True
                )
                for row, (path, at, size) in enumerate(spans):
                    name = path.decode("utf-8", "surrogateescape")
                    assert name not in got
                    attributes = {key: values[row] for key, values in columns.items()}
                    got[name] = block.data[at : at + size].tobytes(), attributes
    finally:
        source.close()
        opened = {os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()}
        assert not opened & set(getattr(source, "shards", []))
    return got


def contents(volume: Volume, name: str) -> dict[str, bytes]:
    """The samples of a dataset, by path."""
    samples = read_dataset(volume, name).items()
    return {path.decode("utf-8", "surrogateescape"): data for path, data in samples}


def import_by_command(folder: Path, command: str) -> dict[str, bytes]:
    """The samples of a new volume after ``dlfs import COMMAND``; ``V`` stands for the volume."""
    image = folder / "by-command.img"
    dlfs.format_volume(str(image), size_bytes=32 << 20)
    words = [str(image) if word == "V" else word for word in shlex.split(command)]
    done = CliRunner().invoke(app, ["import", *words, "--name", "n"])
    assert done.exit_code == 0, done.output
    with dlfs.open(str(image)) as volume:
        return contents(volume, "n")


@contextmanager
def refused(volume: Volume, error: type[DlfsError], match: str) -> Iterator[None]:
    """An import that fails with an error and leaves the volume as it was."""
    before = volume.free_bytes, volume.generation, volume.datasets()
    with pytest.raises(error, match=match) as caught:
        yield
    assert type(caught.value) is error
    assert (volume.free_bytes, volume.generation, volume.datasets()) == before


def import_all(volume: Volume, path: Path, **options: Any) -> dict[str, bytes]:
    """The samples that a path gives a volume."""
    source = open_source(path, **options)
    import_dataset(volume, source, "n")
    source.close()
    return contents(volume, "n")
