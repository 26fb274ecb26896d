"""The release check: it knows the README's sections, and notices examples that fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deploy.release import check
from tests.support.examples import ExampleError, Installation, run_example

HERE = Installation(python=Path(sys.executable))
SECURITY_LIBRARY = check.ROOT / "dlfs" / "_native" / "libdlfs_security.so"


def test_the_sections_that_the_check_names_are_in_the_readme() -> None:
    sections = check._readme()
    assert {*check.NEEDED_MODULES, *check.EMULATED_SECTIONS} <= sections.keys()
    assert "Samples to try it with" in sections.keys() - check.NEEDED_MODULES.keys()


def test_examples_that_print_what_is_shown_pass(tmp_path: Path) -> None:
    run_example("python", "print(6 * 7)  # 42\n", tmp_path, HERE)
    run_example("console", "$ echo in 0.12 s, 3.4 MiB/s\nin 9.99 s, 1 GiB/s\n", tmp_path, HERE)
    run_example("console", "$ seq 100000 | head -1\n1\n", tmp_path, HERE)


@pytest.mark.skipif(not SECURITY_LIBRARY.exists(), reason="built without OpenSSL")
def test_the_handshake_passes_with_this_checkout(tmp_path: Path) -> None:
    check._run_handshake("checkout", HERE, tmp_path)


@pytest.mark.parametrize(
    ("language", "block", "text"),
    [
        ("python", "print(6 * 7)  # 41\n", "but printed:\n42"),
        ("python", "raise ValueError('no')\n", "exited with 1"),
        ("console", "$ echo a\nb\n", "but printed:\na"),
        ("console", "$ false\n", "exited with 1"),
    ],
)
def test_other_examples_fail(language: str, block: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ExampleError, match=text):
        run_example(language, block, tmp_path, HERE)


def test_a_python_that_does_not_start_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, exit_code in (("python3.11", 0), ("python3.12", 127), ("python3.10", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {exit_code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(check._pythons()) == ["python3.11"]
    assert capsys.readouterr().out.startswith("python3.12: not run: ")
