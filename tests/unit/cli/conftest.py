"""A volume with a small dataset, and a way to run the command line on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dlfs
from dlfs.cli.commands import app

SAMPLES = {
    b"a/one.txt": b"one",
    b"a/two.txt": b"two" * 1000,
    b"b/c/deep": b"d" * 300_000,
    b"b/empty": b"",
    b"odd \n\xff name": b"bytes that are no UTF-8: \xff\x00",
    b"top": b"top",
}


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: bytes
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def samples() -> dict[bytes, bytes]:
    """What ``small`` holds."""
    return SAMPLES


Run = Callable[..., Done]


@pytest.fixture
def run() -> Run:
    """Run a verb in this process."""

    def call(*arguments: object, stdin: str | None = None) -> Done:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Done(result.exit_code, result.stdout_bytes, result.stderr)

    return call


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A volume with dataset ``small``."""
    path = tmp_path / "volume.img"
    dlfs.format_volume(str(path), size_bytes=16 << 20, label="tests")
    with dlfs.open(str(path)) as opened, opened.writer("small") as writer:
        for name, data in SAMPLES.items():
            writer.add(name, data)
    return path
