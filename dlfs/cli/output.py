r"""What the verbs print: data on stdout, everything else on stderr.

Paths are bytes. In JSON they are strings in which bytes that are not UTF-8 stand as lone
surrogates (``\udc80`` to ``\udcff``), as Python's ``os.fsdecode`` makes them and ``os.fsencode``
takes them back. As text, a terminal gets one readable line a path, with odd characters escaped;
anything else gets the bytes as they are.

rich is imported when the first table or bar is drawn, numpy never: ``dlfs --help`` must be quick.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

from dlfs.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

COLUMNS_MAX = 8192
"""Of tables that do not go to a terminal."""
JSON_STEP = 1024
"""Elements of a streamed JSON list between two writes."""


@cache
def _console(stderr: bool) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False)


def stdout_console() -> Console:
    """Where data goes."""
    return _console(False)


def stderr_console() -> Console:
    """Where everything else goes: progress, notes, questions, errors."""
    return _console(True)


def print_data(renderable: RenderableType) -> None:
    """Print for people on stdout, as wide as it is where no terminal limits it."""
    console = stdout_console()
    if not console.is_terminal:
        from rich.console import Console

        console = Console(file=console.file, width=COLUMNS_MAX, highlight=False)
    console.print(renderable)


def note(text: str) -> None:
    """Tell the person at the terminal, or the log, what was done."""
    stderr_console().print(text, markup=False, soft_wrap=True)


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """A plain table, the columns in ``right`` flush right."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return made


# ---- values --------------------------------------------------------------------------------------


def json_path(path: bytes) -> str:
    """A path as a JSON string; see the module."""
    return os.fsdecode(path)


def show_path(path: bytes) -> str:
    """A path on one readable line, what cannot be printed escaped."""
    text = path.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def write_path(path: bytes, end: bytes = b"\n") -> None:
    """Write a path on stdout: escaped on a terminal, else its bytes."""
    write_bytes(show_path(path).encode() + end if sys.stdout.isatty() else path + end)


def write_bytes(data: bytes | memoryview) -> None:
    """Write bytes on stdout as they are."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)


def human_date(moment: datetime) -> str:
    """A moment in local time, to the minute."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M")


def human_count(count: int) -> str:
    """A count with separators: ``1,797``."""
    return f"{count:,}"


def human_samples(count: int) -> str:
    """A number of samples: ``1 sample``, ``1,797 samples``."""
    return format_count(count, "sample")


def human_size(size_bytes: float) -> str:
    """A size for people: ``512 B``, ``1.5 MiB``."""
    return format_bytes(size_bytes).replace(".0 ", " ")


def human_seconds(seconds: float) -> str:
    """A duration: ``0.42 s``, ``75 s``, ``12:05``, ``1:02:03``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def human_rate(size_bytes: int, seconds: float) -> str:
    """A size, how long it took, and the rate: ``1.2 GiB in 3.20 s, 384.0 MiB/s``."""
    rate = size_bytes / seconds if seconds > 0 else 0.0
    return f"{human_size(size_bytes)} in {human_seconds(seconds)}, {human_size(rate)}/s"


# ---- JSON ----------------------------------------------------------------------------------------


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=2, default=_plain))


def print_json_stream(
    head: Mapping[str, Any],
    key: str,
    items: Iterable[Mapping[str, Any]],
    *,
    tail: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Print one JSON document ``{**head, key: [items], **tail}`` item by item, in bounded memory.

    Args:
        head: fields before the list.
        key: the list's name.
        items: of the list.
        tail: gives the fields behind the list, when its end is reached.
    """
    encode = json.JSONEncoder(default=_plain).encode
    print(encode(head)[:-1] + (", " if head else "") + f'"{key}": [', end="")
    waiting: list[str] = []
    separator = "\n"
    for item in items:
        waiting.append(separator + encode(item))
        separator = ",\n"
        if len(waiting) == JSON_STEP:
            sys.stdout.write("".join(waiting))
            waiting.clear()
    sys.stdout.write("".join(waiting))
    rest = encode(tail())
    print("\n]" + (", " if rest != "{}" else "") + rest[1:])


def _plain(value: object) -> object:
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return json_path(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
