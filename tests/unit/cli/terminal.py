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
import select
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
    "DLFS_MEMORY": "64MiB",
}
"""All that commands see of the environment, so that the user's settings change nothing."""
MASKS = [
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "00000000-0000-0000-0000-000000000000"),
    (r"\(server \d+", "(server 4194304"),
    (r"127\.0\.0\.1:\d{5}", "127.0.0.1:40000"),
]
"""Patterns of what differs from run to run in notes and tables, and what is printed instead.

They apply before the text is folded, unlike what a test replaces on the screen.
"""

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

    def run(self, *arguments: object, columns: int, rows: int = ROWS, until: str = "") -> str:
        """Run ``dlfs`` with these arguments; the screen that it leaves.

        Args:
            arguments: the command line.
            columns: width of the terminal.
            rows: its height.
            until: text behind which the command gets a Ctrl-C; none by default.
        """
        words = [os.fsdecode(str(word)) for word in arguments]
        return self._ask(columns, rows, arguments=words, until=until)

    def show(self, function: str, *, columns: int, rows: int = ROWS) -> str:
        """Call a function of ``tests.unit.cli.shown``; the screen that it leaves."""
        return self._ask(columns, rows, function=function)

    def _ask(self, columns: int, rows: int, **request: Any) -> str:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        request |= {"columns": columns, "rows": rows}
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        assert answer["code"] in (0, 1, 2, 3, 4), answer["out"]
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
        elif token == "\x1b[H":
            row, column = 0, 0
        elif token == "\x1b[?1049h":
            lines, row, column = [""], 0, 0
        elif token == "\x1b[?1049l":
            break
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
    *("dlfs.cli.commands", "dlfs.ingest.importer", "dlfs.volume.repair", "dlfs.service.client"),
    *(
        "dlfs.service.statistics",
        "dlfs.service.process",
        "dlfs.volume.volume",
        "rich.progress",
        "rich.text",
        "tests.unit.cli.shown",
    ),
)
"""Modules that commands need."""


def _serve() -> None:
    for name in _PRELOADED:
        importlib.import_module(name)
    output = importlib.import_module("dlfs.cli.output")
    command = typer.main.get_command(importlib.import_module("dlfs.cli.commands").app)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        command(args=["uri"])  # typer loads much of itself when it first parses
    output._console.cache_clear()  # it saw no terminal
    for line in sys.stdin:
        request = json.loads(line)
        terminal, theirs = pty.openpty()
        pid = os.fork()
        if pid == 0:
            os.close(terminal)
            os.login_tty(theirs)
            _become(request, command)
        shown = _follow(terminal, pid, request.get("until", "").encode())
        os.close(terminal)
        os.close(theirs)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"code": code, "out": shown.decode("utf-8", "replace")}), flush=True)


def _follow(terminal: int, pid: int, until: bytes) -> bytes:
    """Read what a terminal shows until its process ends; type Ctrl-C behind a text.

    The caller keeps the other side open: the kernel may drop the last output of a terminal whose
    last writer has gone.
    """
    shown, ended = b"", False
    process = os.pidfd_open(pid)
    while True:
        ready, _, _ = select.select(
            [terminal] if ended else [terminal, process], [], [], 0 if ended else None
        )
        if terminal in ready:
            shown += os.read(terminal, 65536)
            if until and until in shown:
                os.write(terminal, b"\x03")
                until = b""
        elif ended:
            break
        ended = ended or process in ready
    os.close(process)
    return shown


def _print_steadily() -> None:
    """Let all that is reported have taken a quarter of a second, and apply ``MASKS``."""
    from dlfs.cli import output
    from dlfs.cli.verbs import export, import_, seal, verify

    def masked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(text: Any, **options: Any) -> Any:
            for pattern, placeholder in MASKS if isinstance(text, str) else ():
                text = re.sub(pattern, placeholder, text)
            return function(text, **options)

        return call

    def human_rate(size_bytes: int, _seconds: float) -> str:
        return output.human_rate(size_bytes, 0.25)

    for module in (export, import_, seal, verify):
        module.human_rate = human_rate
    output.show_text, output.print_text = masked(output.show_text), masked(output.print_text)


def _become(request: dict[str, Any], command: Callable[..., Any]) -> None:
    """Run what was asked for, in a process and on a terminal of its own."""
    size = struct.pack("HHHH", request["rows"], request["columns"], 0, 0)
    fcntl.ioctl(1, termios.TIOCSWINSZ, size)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = 1
    try:
        if "function" in request:
            shown = importlib.import_module("tests.unit.cli.shown")
            getattr(shown, request["function"])()
            code = 0
        else:
            _print_steadily()
            command(args=request["arguments"])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
