"""``python -m bench figures``: write the tables of the documents from the published figures.

``bench/results/published-NAME.json`` has the figures that README.md and docs/ show, as they were
measured: date, commit, machine, commands and tables. A document has a table between two comments,
``<!-- figures: NAME TABLE -->`` and ``<!-- end of figures -->``. A table may select cells of
another one of its file: ``{ROW|COLUMN}`` in a cell stands for that cell of the table ``from``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.command import RESULTS, command_line
from bench.process import ROOT
from bench.report import Table

DOCUMENTS = ("README.md", "docs/performance.md")
_PLACE = re.compile(
    r"(?P<begin><!-- figures: (?P<name>\S+) (?P<table>\S+) -->)"
    r".*?(?P<end><!-- end of figures -->)",
    re.DOTALL,
)
_CELL = re.compile(r"\{([^|}]+)\|([^|}]+)\}")


def published(name: str, results: Path = RESULTS) -> dict[str, Any]:
    """Return the content of a file of published figures."""
    content: dict[str, Any] = json.loads((results / f"published-{name}.json").read_text("utf-8"))
    return content


def table_of(figures: dict[str, Any], name: str) -> Table:
    """Return a table of published figures, with the cells that it takes from another one."""
    wanted = figures["tables"][name]
    rows = wanted["rows"]
    if "from" in wanted:
        source = figures["tables"][wanted["from"]]
        cells = {
            (row[0], column): cell
            for row in source["rows"]
            for column, cell in zip(source["columns"], row, strict=True)
        }
        rows = [
            [_CELL.sub(lambda cell: cells[cell.groups()], text) for text in row] for row in rows
        ]
    return Table("", wanted["columns"], rows)


def with_tables(text: str, results: Path = RESULTS) -> str:
    """Return a document's text with each of its tables as the published figures have it."""

    def written(place: re.Match[str]) -> str:
        table = table_of(published(place["name"], results), place["table"])
        return "\n".join([place["begin"], "", *table.markdown(), "", place["end"]])

    return _PLACE.sub(written, text)


def main(words: Sequence[str] | None = None) -> int:
    """Write the tables of all documents."""
    command_line("bench figures", __doc__).parse_args(words)
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(with_tables(path.read_text("utf-8")), encoding="utf-8")
    return 0
