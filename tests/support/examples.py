"""Extracts the examples of a document, runs them, and compares what they print with the document.

Examples are blocks of Python and of commands. The tests run them with the dlfs of the checkout, the
release check with an installed package.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

VARYING = [
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID"),
    (r"in \d+\.\d\d s, \d+(\.\d)? [KMG]iB/s", "in TIME, RATE"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d", "DATE"),
]
"""Patterns of output that differs from run to run, and their replacements."""

SIGPIPE_EXIT = 141
"""Exit code of a pipeline in which ``head`` has closed its input early."""


class ExampleError(AssertionError):
    """An example failed, or printed other text than the document shows."""


@dataclass(frozen=True, kw_only=True)
class Installation:
    """A Python that has dlfs, and the environment of its examples."""

    python: Path
    """The interpreter; the ``dlfs`` command is in the same folder."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the examples, in addition to those of this process."""

    def environment(self) -> dict[str, str]:
        """Return the environment of an example."""
        path = f"{self.python.parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, **self.variables}


def sections(page: str, text: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Give the title of each section of a page, and its blocks: language and text."""
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        title = section.partition("\n")[0].removeprefix("# ")
        blocks = re.findall(r"^```(python|console)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        if blocks:
            yield f"{page}: {title}", blocks


def printed_texts(code: str) -> list[str]:
    """Return what the ``print(...)  # text`` lines of an example print."""
    return re.findall(r"print\(.*\)  # (.*)", code)


def run_example(language: str, block: str, folder: Path, installation: Installation) -> None:
    """Run a block in a folder.

    Args:
        language: ``python`` or ``console``.
        block: the text of the block.
        folder: working directory of the block.
        installation: the Python and the dlfs that run it.

    Raises:
        ExampleError: it failed, or printed other text than the document shows.
    """
    run = {"python": _run_python, "console": _run_console}[language]
    run(block, folder, installation)


def _run_python(code: str, folder: Path, installation: Installation) -> None:
    """Run a block of Python; each ``print(...)  # text`` in it prints that text."""
    done = subprocess.run(
        [installation.python, "-c", code],
        cwd=folder,
        env=installation.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ExampleError(f"{code}\nexited with {done.returncode}:\n{done.stderr}")
    _compare(code, "\n".join(printed_texts(code)), "\n".join(done.stdout.splitlines()))


def _run_console(block: str, folder: Path, installation: Installation) -> None:
    """Run each command of a block; it prints the text below it."""
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=folder,
            env=installation.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode not in (0, SIGPIPE_EXIT):
            raise ExampleError(f"{command}\nexited with {done.returncode}:\n{done.stdout}")
        _compare(command, shown, done.stdout)


def _compare(code: str, shown: str, printed: str) -> None:
    """Raise ExampleError unless the printed text equals the text of the document."""
    for pattern, word in VARYING:
        shown, printed = re.sub(pattern, word, shown), re.sub(pattern, word, printed)
    if shown != printed:
        raise ExampleError(f"{code}\nis shown to print:\n{shown}\nbut printed:\n{printed}")
