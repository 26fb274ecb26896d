from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlfs import errors
from dlfs._native.library import error_for
from dlfs.cli.exits import EXITS, ExitCode, exit_code_of
from dlfs.errors import DlfsError

PAGE = Path(__file__).parents[3] / "docs" / "command-line.md"

EXPECTED = {
    "DlfsError": 1,
    "UsageError": 2,
    "ClosedError": 2,
    "NotFoundError": 3,
    "ExistsError": 1,
    "LockedError": 5,
    "SpaceError": 6,
    "StaleError": 1,
    "LimitError": 1,
    "AuthenticationError": 8,
    "DegradedError": 7,
    "DeviceError": 7,
    "DeviceLostError": 7,
    "DeviceTimeoutError": 7,
    "LeaseLostError": 7,
    "FormatError": 4,
    "ChecksumError": 4,
    "VersionError": 4,
    "TruncatedError": 4,
    "NativeError": 1,
    "ServiceLostError": 1,
    "TransformError": 1,
}


def tree(base: type[DlfsError]) -> Iterator[type[DlfsError]]:
    yield base
    for child in base.__subclasses__():
        yield from tree(child)


def test_every_error_has_its_code() -> None:
    found = {
        error.__name__: int(exit_code_of(error("x")))
        for error in tree(DlfsError)
        if error.__module__ == errors.__name__
    }
    assert found == EXPECTED


def test_errors_of_the_system_are_of_devices() -> None:
    assert exit_code_of(PermissionError("x")) == ExitCode.DEVICE


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_file_system_is_too_little_space(code: int) -> None:
    assert exit_code_of(OSError(code, "x")) == ExitCode.SPACE
    assert exit_code_of(errors.write_error("x", code)) == ExitCode.SPACE
    assert exit_code_of(error_for(-code, "x")) == ExitCode.SPACE


def test_every_code_has_one_row() -> None:
    assert [row.code for row in EXITS] == sorted(ExitCode)


@pytest.mark.parametrize("row", EXITS, ids=lambda row: row.code.name)
def test_help_prints_the_table(run, row) -> None:
    text = " ".join(run("--help").out.decode().split())
    assert f"{row.code:d} {' '.join(row.meaning.split())}" in text


@pytest.mark.parametrize("row", EXITS, ids=lambda row: row.code.name)
def test_readme_has_the_table(row) -> None:
    assert f"| {row.code:d} | {row.meaning} |\n" in PAGE.read_text()
