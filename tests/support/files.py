"""Writes files and trees of them, packs them, and damages files."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path


def write_files(folder: Path, files: Mapping[str, bytes] | Mapping[bytes, bytes]) -> Path:
    """Write files, and the folders that they lie in, below a folder, and return the folder."""
    for name, data in files.items():
        path = folder / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def tar(*entries: tuple[str, bytes] | tarfile.TarInfo, layout: int = tarfile.GNU_FORMAT) -> bytes:
    """Pack files, by name and bytes, and members without bytes, as they are, into an archive."""
    out = io.BytesIO()
    with tarfile.open(
        fileobj=out, mode="w", format=layout, encoding="utf-8", errors="surrogateescape"
    ) as archive:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                archive.addfile(entry)
                continue
            header = tarfile.TarInfo(entry[0])
            header.size = len(entry[1])
            archive.addfile(header, io.BytesIO(entry[1]))
    return out.getvalue()


def write_at(path: str | os.PathLike[str], offset: int, data: bytes) -> None:
    """Write bytes to a place of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def flip_bit(path: str | os.PathLike[str], offset: int, bit: int = 0) -> None:
    """Flip a bit of a byte of a file; a negative offset counts from its end."""
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << bit]))


def cut(path: Path, size: int) -> None:
    """Cut a file; a negative size counts from its end."""
    path.write_bytes(path.read_bytes()[:size])
