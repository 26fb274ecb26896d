r"""Prints the output of the verbs: data on stdout, everything else on stderr.

Paths are bytes. In JSON, bytes that are not UTF-8 are lone surrogates (``\udc80`` to ``\udcff``):
``os.fsdecode`` makes them, and ``os.fsencode`` turns them back. A terminal gets one readable line
for each path, with unprintable characters escaped; any other output gets the bytes unchanged.

Tables and texts fit the terminal. A table first leaves out the columns that it declares as the
least useful, then folds names and texts over several lines. It never cuts a number or a name.
Output that does not go to a terminal is complete, whatever its width; so is JSON.

The first table or bar imports rich; this module never imports numpy, so that ``dlfs --help`` is
fast.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from itertools import zip_longest
from typing import IO, TYPE_CHECKING, Any
from uuid import UUID

from dlfs.base.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

COLUMNS_MAX = 8192
"""Width of output that does not go to a terminal, in characters."""
COLUMNS_UNKNOWN = 80
"""Width of a terminal that does not report its size, in characters."""
FOLD_COLUMNS = 24
"""Least width of a folded name, in characters; narrower, the table drops a column instead."""
GAP_COLUMNS = 2
"""Space between two columns of a table, in characters."""
BAR_COLUMNS = 20
"""Length of a bar that shows a fraction, in characters."""
FIELD_COLUMNS = 8
"""Least width of the names of fields, in characters."""
JSON_STEP = 1024
"""Number of elements of a streamed JSON list between two writes."""


class Verbosity(Enum):
    """The amount of reports on stderr in addition to errors."""

    QUIET = "errors only"
    NORMAL = "notes and progress"
    VERBOSE = "what is opened, too"


_verbosity = Verbosity.NORMAL


def set_verbosity(wanted: Verbosity) -> None:
    """Set the amount of reports from now on, those of the library's log included."""
    global _verbosity
    _verbosity = wanted
    quiet, verbose = wanted is Verbosity.QUIET, wanted is Verbosity.VERBOSE
    logging.getLogger().setLevel(logging.ERROR if quiet else logging.WARNING)
    logging.getLogger("dlfs").setLevel(logging.DEBUG if verbose else logging.NOTSET)


def is_quiet() -> bool:
    """Return True if only errors are reported."""
    return _verbosity is Verbosity.QUIET


@contextmanager
def log_on_stderr() -> Iterator[None]:
    """Report the library's log on stderr while the block runs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("dlfs: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        set_verbosity(Verbosity.NORMAL)


def log_events() -> None:
    """Report the log of a server on stderr until the command ends."""
    if not is_quiet():
        logging.getLogger().setLevel(logging.INFO)


@cache
def _console(stderr: bool) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False)


def stdout_console() -> Console:
    """Return the console on stdout, for data."""
    return _console(False)


def stderr_console() -> Console:
    """Return the console on stderr, for progress, notes, questions and errors."""
    return _console(True)


def terminal_columns(file: IO[str]) -> int | None:
    """Return the width of a file's terminal in characters; None if the file is no terminal."""
    if not file.isatty():
        return None
    named = os.environ.get("COLUMNS", "")
    if named.isdecimal() and int(named):
        return int(named)
    try:
        return os.get_terminal_size(file.fileno()).columns or COLUMNS_UNKNOWN
    except (OSError, ValueError):  # the file only claims to be a terminal
        return COLUMNS_UNKNOWN


def print_data(renderable: RenderableType) -> None:
    """Print a table or a group of tables on stdout."""
    from rich.console import Console

    file = stdout_console().file
    width = terminal_columns(file) or COLUMNS_MAX
    Console(file=file, width=width, highlight=False).print(renderable, crop=False)


def print_text(text: str | Text, *, indent: int = 0, style: str = "", stderr: bool = False) -> None:
    """Print a line; a terminal gets it indented and folded between words.

    Args:
        text: text to print; a ``str`` has no markup.
        indent: number of spaces before each line.
        style: colours, in rich's notation.
        stderr: True prints on stderr instead of stdout.
    """
    from rich.text import Text

    console = _console(stderr or hasattr(sys.stdout, "rich_proxied_file"))  # below a bar
    width = terminal_columns(console.file)
    whole = Text(text, style) if isinstance(text, str) else text
    for line in _fold(console, whole, width and width - indent):
        console.print(Text(" " * indent) + line, soft_wrap=True)


def print_fields(fields: Mapping[str, object]) -> None:
    """Print names and values on stdout, the names flush right; a value may have several lines."""
    from rich.text import Text

    console = stdout_console()
    width = terminal_columns(console.file)
    indent = max(FIELD_COLUMNS, *map(len, fields)) + GAP_COLUMNS
    for name, value in fields.items():
        head = Text(f"{name:>{indent - GAP_COLUMNS}}{'':{GAP_COLUMNS}}", "bold")
        for text in str(value).split("\n"):
            for line in _fold(console, Text(text), width and width - indent):
                console.print(head + line, soft_wrap=True)
                head = Text(" " * indent)


@contextmanager
def result_of_change() -> Iterator[None]:
    """Say in errors of stdout, while the block prints a result, that the change was made.

    A script that repeated the command would make the change twice.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        error.add_note("the command has made its changes; only its output is missing")
        raise


def note(text: str) -> None:
    """Report an action on stderr, unless only errors are reported."""
    if not is_quiet():
        print_text(text, stderr=True)


def note_left_out(skipped: Mapping[str, int]) -> None:
    """Report on stderr what an import left out, by reason."""
    for reason, count in skipped.items():
        note(f"left out: {human_count(count)} x {reason}")


def _fold(console: Console, text: Text, width: int | None) -> Iterable[Text]:
    """Return the lines of a text, folded between words if it can be; a width of None folds none."""
    if width is None or not text:
        return [text]
    return text.wrap(console, max(1, width), overflow="fold")


# ---- tables --------------------------------------------------------------------------------------


class Table:
    """A table that fits its terminal. A renderable of rich.

    Args:
        titles: titles of the columns.
        right: titles of the columns that are flush right and never folded, such as numbers.
        drop: titles of the columns that a narrow terminal leaves out, the least useful first.
        header: False leaves the titles out.
    """

    def __init__(
        self,
        *titles: str,
        right: Iterable[str] = (),
        drop: Sequence[str] = (),
        header: bool = True,
    ) -> None:
        from rich.text import Text

        self._titles = [Text(title, "bold") for title in titles]
        self._right = [title in set(right) for title in titles]
        self._drop = [titles.index(title) for title in drop]
        self._header = header
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a row; a ``str`` has no markup, and unprintable characters are escaped."""
        from rich.text import Text

        self._rows.append(
            [Text(show_text(cell)) if isinstance(cell, str) else cell for cell in cells]
        )

    def _fit(self, width: int) -> dict[int, int]:
        """Return the columns to show and their widths, in characters."""
        rows = [self._titles, *self._rows] if self._header else self._rows
        natural = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
        shown = {
            column: size if self._right[column] else min(size, FOLD_COLUMNS)
            for column, size in enumerate(natural)
        }
        for column in self._drop:
            if _total(shown.values()) <= width:
                break
            del shown[column]
        self._widen(shown, natural, width)
        return shown

    def _widen(self, shown: dict[int, int], natural: Sequence[int], width: int) -> None:
        """Divide the remaining width among the columns that fold, the narrow ones first."""
        folding = sorted((c for c in shown if not self._right[c]), key=natural.__getitem__)
        room = width - _total(0 if column in folding else shown[column] for column in shown)
        for position, column in enumerate(folding):
            share = max(1, room // (len(folding) - position))
            shown[column] = min(natural[column], share)
            room -= shown[column]

    def _lines(
        self, console: Console, row: Sequence[Text], shown: dict[int, int]
    ) -> Iterator[Text]:
        """Yield one row as the lines of a terminal."""
        from rich.text import Text

        cells = [
            list(_fold(console, row[column], None if self._right[column] else width))
            for column, width in shown.items()
        ]
        for parts in zip_longest(*cells, fillvalue=Text()):
            line = Text(no_wrap=True, overflow="ignore")  # rich must not fold or cut it again
            for (column, width), part in zip(shown.items(), parts, strict=True):
                space = " " * max(0, width - part.cell_len)
                line.append_text(Text(space) + part if self._right[column] else part + Text(space))
                line.append(" " * GAP_COLUMNS)
            line.rstrip()
            yield line

    def lay_out(self, console: Console, width: int) -> tuple[list[Text], list[list[Text]]]:
        """Lay the table out for a terminal of this many characters.

        Returns:
            The lines of the heading, and those of each row.
        """
        from rich.text import Text

        shown = self._fit(width)
        heading = list(self._lines(console, self._titles, shown)) if self._header else []
        if self._header:
            heading.append(Text("─" * _total(shown.values()), no_wrap=True, overflow="ignore"))
        return heading, [list(self._lines(console, row, shown)) for row in self._rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines to rich."""
        heading, rows = self.lay_out(console, options.max_width)
        yield from heading
        for row in rows:
            yield from row


def _total(widths: Iterable[int]) -> int:
    """Return the width of columns and the gaps between them, in characters."""
    return sum(width + GAP_COLUMNS for width in widths) - GAP_COLUMNS


# ---- values --------------------------------------------------------------------------------------


def json_path(path: bytes) -> str:
    """Return a path as a JSON string; see the module."""
    return os.fsdecode(path)


def show_path(path: bytes) -> str:
    """Return a path as one readable line, with unprintable characters escaped."""
    text = path.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def show_text(text: str) -> str:
    """Return a name as one readable line, with unprintable characters escaped."""
    return show_path(os.fsencode(text))


def write_bytes(data: bytes | memoryview) -> None:
    """Write bytes unchanged on stdout."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)


def human_date(moment: datetime) -> str:
    """Return a moment in local time, to the minute; in UTC, with a Z, if TZ is unusable."""
    try:
        return moment.astimezone().strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError):  # the zone is a day or more away from UTC
        return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%MZ")


def human_count(count: int) -> str:
    """Return a count with separators: ``1,797``."""
    return f"{count:,}"


def human_samples(count: int) -> str:
    """Return a number of samples: ``1 sample``, ``1,797 samples``."""
    return format_count(count, "sample")


def human_size(size_bytes: float) -> str:
    """Return a size in a readable unit: ``512 B``, ``1.5 MiB``."""
    return format_bytes(size_bytes).replace(".0 ", " ")


def human_seconds(seconds: float) -> str:
    """Return a duration: ``0.42 s``, ``75 s``, ``12:05``, ``1:02:03``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"


def share_bar(share: float) -> str:
    """Return a fraction between 0 and 1 as a bar."""
    filled = round(BAR_COLUMNS * min(1.0, share))
    return "█" * filled + "░" * (BAR_COLUMNS - filled)


def human_rate(size_bytes: int, seconds: float) -> str:
    """Return a size, its duration and the rate: ``1.2 GiB in 3.20 s, 384.0 MiB/s``."""
    rate = size_bytes / seconds if seconds > 0 else 0.0
    return f"{human_size(size_bytes)} in {human_seconds(seconds)}, {human_size(rate)}/s"


# ---- JSON ----------------------------------------------------------------------------------------


def print_json(value: Mapping[str, Any], *, result: bool = False) -> None:
    """Print one JSON document; ``result``: as ``result_of_change``."""
    with result_of_change() if result else nullcontext():
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
        key: name of the list.
        items: elements of the list.
        tail: returns the fields after the list; called at its end.
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
    last = encode(tail())
    print("\n]" + (", " if last != "{}" else "") + last[1:])


def _plain(value: object) -> object:
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return json_path(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
