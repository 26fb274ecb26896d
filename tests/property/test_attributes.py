"""Whatever columns are given in whatever blocks come back by index."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dlfs.attributes import AttributesBuilder, AttributeTable
from dlfs.format.attributes import FIXED

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "text": st.text(max_size=6),
    **{
        kind: st.integers(int(np.iinfo(kind).min), int(np.iinfo(kind).max))
        for kind in FIXED
        if "int" in kind
    },
    **{
        kind: st.floats(width=int(kind[5:])).map(np.dtype(kind).type)  # type: ignore[arg-type]
        for kind in FIXED
        if "float" in kind
    },
}


def array(kind: str, values: list[Any]) -> Any:
    return np.array(values, object if kind == "text" else kind)


@settings(max_examples=60)
@given(st.data())
def test_columns_come_back(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=5))
    sizes = data.draw(st.lists(st.integers(0, 20), max_size=4))
    total = sum(sizes)
    builder = AttributesBuilder()
    model: dict[str, Any] = {}
    for number, kind in enumerate(kinds):
        name = f"{kind} {number}"
        zero = "" if kind == "text" else np.nan if "float" in kind else 0
        model[name] = array(kind, [zero] * total)
    row = 0
    given_at_all = set()
    for size in sizes:
        block = {}
        for number, kind in enumerate(kinds):
            if data.draw(st.booleans()):
                values = data.draw(st.lists(VALUES[kind], min_size=size, max_size=size))
                block[f"{kind} {number}"] = array(kind, values)
                model[f"{kind} {number}"][row : row + size] = block[f"{kind} {number}"]
        given_at_all |= block.keys()
        builder.append(builder.prepare(block, size), row)
        row += size
    rows = np.array(data.draw(st.permutations(range(total))), np.int64)
    parts = builder.freeze(UUID(int=1), rows)
    table = AttributeTable.over(np.concatenate(parts), parts[0].nbytes)
    assert set(table.dtypes) == given_at_all
    for name in given_at_all:
        np.testing.assert_array_equal(table.column(name), model[name][rows])
        assert table.dtypes[name] == model[name].dtype
