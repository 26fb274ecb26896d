"""A volume with a small dataset, and a way to run the command line on it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dlfs.cli.commands import app
from tests.support.volumes import new_volume, write_dataset

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
    """Exit code and output of a command."""

    code: int
    out: bytes
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def samples() -> dict[bytes, bytes]:
    """Return the samples of the dataset ``small``, by path."""
    return SAMPLES


Run = Callable[..., Done]

PYTHON_WORDS = re.compile(
    r"""(?<!\w)b['"]|\bTraceback\b|\b(?:None|True|False)\b|\{'|<class|object\ at\ 0x|\[Errno|
    \b[A-Z][A-Za-z]*(?:Error|Exception)\b|\b[a-z]+(?:_[a-z]+)+\b""",
    re.VERBOSE,
)
"""Pattern of literals, classes and argument names of Python, which no message may have."""
WORDS_OF_USERS = {"tls_psk", "dhchap_key", "io_uring", "file_name"}
"""Words with underscores that are no arguments."""


def check_message(message: str) -> None:
    """Find Python's words in what a command says of an error; words of paths do not count."""
    plain = " ".join(word for word in message.split() if "/" not in word)
    found = {match[0] for match in PYTHON_WORDS.finditer(plain)} - WORDS_OF_USERS
    assert not found, f"Python's words in: {message}"


@pytest.fixture
def run() -> Run:
    """Run a verb in this process."""

    def call(*arguments: object, stdin: str | None = None) -> Done:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if result.exit_code and "--debug" not in arguments:
            check_message(result.stderr)
        return Done(result.exit_code, result.stdout_bytes, result.stderr)

    return call


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A volume with dataset ``small``."""
    path = new_volume(tmp_path / "volume.img", size_bytes=16 << 20, label="tests")
    write_dataset(path, "small", SAMPLES)
    return path
