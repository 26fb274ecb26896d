"""The tables of the documents are those of the published figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import figures
from bench.command import RESULTS
from bench.process import ROOT


@pytest.mark.parametrize("name", figures.DOCUMENTS)
def test_documents_show_the_published_figures(name: str) -> None:
    text = (ROOT / name).read_text()
    assert "<!-- figures: " in text
    assert figures.with_tables(text) == text, "run python -m bench figures"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("published-*.json")), ids=lambda p: p.stem)
def test_published_figures_say_how_they_were_measured(path: Path) -> None:
    content = json.loads(path.read_text())
    assert {"date", "commit", "machine", "command", "notes", "tables"} <= set(content)
    for name in content["tables"]:
        table = figures.table_of(content, name)
        assert {len(row) for row in table.rows} == {len(table.columns)}
        assert not any("{" in cell for row in table.rows for cell in row)


def test_a_table_takes_cells_of_another(tmp_path: Path) -> None:
    tables = {
        "all": {"columns": ["", "cold"], "rows": [["ours", "12"], ["theirs", "3"]]},
        "some": {
            "from": "all",
            "columns": ["", "x"],
            "rows": [["both", "{ours|cold}; {theirs|cold}"]],
        },
    }
    (tmp_path / "published-race.json").write_text(json.dumps({"tables": tables}))
    text = "a\n<!-- figures: race some -->\nold\n<!-- end of figures -->\nb\n"
    written = figures.with_tables(text, tmp_path)
    assert "\n|  | x |\n| --- | --- |\n| both | 12; 3 |\n\n<!-- end of figures -->\nb\n" in written
    assert figures.with_tables(written, tmp_path) == written
