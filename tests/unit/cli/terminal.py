"""Runs commands on pseudo-terminals of any width, and gives what they leave on the screen.

``Terminal`` is the tests' side. It starts this file as a process, which imports the command line
once and forks for every command; so a command takes milliseconds, and still has a terminal of its
own as stdin, stdout and stderr.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import typer

ROOT = Path(__file__).parents[3]
ROWS = 50
ENVIRONMENT = {
    "PATH": os.environ.get("PATH", ""),
    "HOME": "/nonexistent",
    "LANG": "C.UTF-8",
    "TERM": "xterm-256color",
    "TZ": "UTC",
    "PYTHONPATH": str(ROOT),
    "OPENBLAS_NUM_THREADS": "1",  # forks safely
}
"""All that commands see of the environment, so that the user's settings change nothing."""

_CONTROL = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|\x1b\].*?(?:\x07|\x1b\\)|\r|\n|[^\x1b\r\n]+|\x1b.")


class Terminal:
    """A place to run commands in.

    Args:
        folder: the commands' working directory.
        extra: environment variables besides ``ENVIRONMENT``.
    """

    def __init__(self, folder: Path, **extra: str) -> None:
        self.folder = folder
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env=ENVIRONMENT | extra,
        )

    def run(self, *arguments: object, columns: int) -> str:
        """Run ``dlfs`` with these arguments; the screen that it leaves."""
        return self._ask(columns, arguments=[os.fsdecode(str(word)) for word in arguments])

    def show(self, function: str, *, columns: int) -> str:
        """Call a function of ``tests.unit.cli.shown``; the screen that it leaves."""
        return self._ask(columns, function=function)

    def _ask(self, columns: int, **request: Any) -> str:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({"columns": columns, **request}).encode() + b"\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        assert answer["code"] in request.get("codes", (0, 2, 3, 4)), answer["out"]
        return screen(answer["out"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()
        assert self._server.returncode == 0


def screen(text: str) -> str:
    """The lines that a terminal shows in the end; of a full-screen program, its last picture.

    Lines longer than the terminal are not wrapped, so that tests see them.
    """
    lines, row, column = [""], 0, 0
    for token in _CONTROL.findall(text):
        if token == "\n":
            row += 1
        elif token == "\r":
            column = 0
        elif token == "\x1b[H" or token == "\x1b[?1049h":
            lines, row, column = [""], 0, 0
        elif token == "\x1b[2K":
            lines[row] = ""
        elif re.fullmatch(r"\x1b\[\d+A", token):
            row -= int(token[2:-1])
        elif not token.startswith("\x1b"):
            lines[row] = (
                lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            )
            column += len(token)
        lines += [""] * (row + 1 - len(lines))
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


# ---- the process that runs them ------------------------------------------------------------------


_PRELOADED = (
    *("dlfs.cli.commands", "dlfs.ingest.importer", "dlfs.mending", "dlfs.service.client"),
    *("dlfs.service.figures", "dlfs.volume", "rich.progress", "rich.text", "tests.unit.cli.shown"),
)
"""Modules that commands need."""


def _serve() -> None:
    for name in _PRELOADED:
        importlib.import_module(name)
    command = typer.main.get_command(importlib.import_module("dlfs.cli.commands").app)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        command(args=["uri"])  # typer loads much of itself when it first parses
    for line in sys.stdin:
        request = json.loads(line)
        pid, terminal = pty.fork()
        if pid == 0:
            _become(request, command)
        shown = b""
        try:
            while part := os.read(terminal, 65536):
                shown += part
        except OSError:
            pass  # its last writer is gone
        os.close(terminal)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"code": code, "out": shown.decode("utf-8", "replace")}), flush=True)


def _stop_clocks() -> None:
    """Let all that is reported have taken a quarter of a second."""
    from dlfs.cli import export, import_, output, verify

    def human_rate(size_bytes: int, _seconds: float) -> str:
        return output.human_rate(size_bytes, 0.25)

    for module in (export, import_, verify):
        module.human_rate = human_rate


def _become(request: dict[str, Any], command: Callable[..., Any]) -> None:
    """Run what was asked for, in a process and on a terminal of its own."""
    size = struct.pack("HHHH", ROWS, request["columns"], 0, 0)
    fcntl.ioctl(1, termios.TIOCSWINSZ, size)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = 1
    try:
        if "function" in request:
            shown = importlib.import_module("tests.unit.cli.shown")
            getattr(shown, request["function"])()
            code = 0
        else:
            _stop_clocks()
            command(args=request["arguments"])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
