"""Numbers and names below incoming."""

from __future__ import annotations

import pytest

from dlfs.errors import StaleError
from dlfs.staging.inode_numbers import INCOMING, ROOT, is_incoming, pack
from dlfs.staging.inode_table import NodeTable


@pytest.fixture
def table() -> NodeTable:
    return NodeTable((1, 1))


def test_ranges_of_numbers(table: NodeTable) -> None:
    node = table.found(table.root, b"x", (1, 2), directory=True)
    assert is_incoming(INCOMING)
    assert is_incoming(node.number)
    assert not is_incoming(ROOT)
    assert not is_incoming(pack(1, 0, 0))


def test_two_names_are_one_node(table: NodeTable) -> None:
    top = table.found(table.root, b"x", (1, 2), directory=True)
    node = table.found(top, b"a", (1, 3), directory=False)
    assert table.found(top, b"b", (1, 3), directory=False) is node
    assert table.found(top, b"b", (1, 3), directory=False) is node
    assert [name for _, name in node.places] == [b"a", b"b"]
    table.removed(top, b"b", (1, 3), last=False)
    assert node.path == b"x/a"
    table.forget(node.number, 2)
    assert table.get(node.number) is node
    table.forget(node.number, 1)
    with pytest.raises(StaleError):
        table.get(node.number)
    table.forget(node.number, 1)  # more than it was told of: nothing


def test_an_identity_that_is_used_again_is_a_new_node(table: NodeTable) -> None:
    top = table.found(table.root, b"x", (1, 2), directory=True)
    old = table.found(top, b"a", (1, 3), directory=False)
    table.removed(top, b"a", (1, 3), last=True)
    new = table.found(top, b"a", (1, 3), directory=False)
    assert new is not old
    assert new.number != old.number
    assert (old.places, table.get(old.number)) == ([], old)
    table.forget(old.number, 1)
    assert table.known((1, 3)) is new


def test_a_directory_stays_while_something_in_it_is_known(table: NodeTable) -> None:
    top = table.found(table.root, b"x", (1, 2), directory=True)
    folder = table.found(top, b"d", (1, 3), directory=True)
    leaf = table.found(folder, b"f", (1, 4), directory=False)
    table.forget(top.number, 1)
    table.forget(folder.number, 1)
    assert (leaf.path, leaf.dataset(), len(table)) == (b"x/d/f", top, 4)
    leaf.handles.add(7)
    table.forget(leaf.number, 1)
    assert len(table) == 4
    table.closed(leaf, 7)
    assert len(table) == 1


def test_renaming(table: NodeTable) -> None:
    top = table.found(table.root, b"x", (1, 2), directory=True)
    other = table.found(table.root, b"y", (1, 5), directory=True)
    folder = table.found(top, b"d", (1, 3), directory=True)
    leaf = table.found(folder, b"f", (1, 4), directory=False)
    assert leaf.is_in(top)
    assert table.renamed((top, b"d"), (other, b"e"), (1, 3)) is folder
    assert (leaf.path, leaf.dataset()) == (b"y/e/f", other)
    assert leaf.is_in(other)
    assert not leaf.is_in(top)
    assert table.renamed((top, b"?"), (other, b"?"), (1, 99)) is None
    moved = table.found(top, b"d2", (1, 3), directory=True)  # behind our back
    assert moved.places == [(top, b"d2")]


def test_what_lies_in_a_dataset_that_is_gone(table: NodeTable) -> None:
    top = table.found(table.root, b"x", (1, 2), directory=True)
    leaf = table.found(top, b"f", (1, 4), directory=False)
    table.removed(table.root, b"x", (1, 2), last=True)
    for node in (top, leaf):
        with pytest.raises(StaleError):
            node.dataset()
    table.forget(leaf.number, 1)
    table.forget(top.number, 1)
    assert len(table) == 1
    assert table.removed(table.root, b"x", (1, 2), last=True) is None
