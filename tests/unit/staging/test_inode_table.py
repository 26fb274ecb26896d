"""Numbers and names below incoming."""

from __future__ import annotations

import pytest

from dlfs.errors import StaleError
from dlfs.staging.inode_numbers import ROOT
from dlfs.staging.inode_table import InodeTable


@pytest.fixture
def table() -> InodeTable:
    return InodeTable((1, 1))


def test_numbers(table: InodeTable) -> None:
    inode = table.note_lookup(table.root, b"x", (1, 2), directory=True)
    assert table.get(ROOT) is table.root
    assert inode.number == ROOT + 1


def test_two_names_are_one_node(table: InodeTable) -> None:
    top = table.note_lookup(table.root, b"x", (1, 2), directory=True)
    inode = table.note_lookup(top, b"a", (1, 3), directory=False)
    assert table.note_lookup(top, b"b", (1, 3), directory=False) is inode
    assert table.note_lookup(top, b"b", (1, 3), directory=False) is inode
    assert [name for _, name in inode.links] == [b"a", b"b"]
    table.note_removal(top, b"b", (1, 3), last=False)
    assert inode.path == b"x/a"
    table.forget(inode.number, 2)
    assert table.get(inode.number) is inode
    table.forget(inode.number, 1)
    with pytest.raises(StaleError):
        table.get(inode.number)
    table.forget(inode.number, 1)  # more look-ups than it has: no effect


def test_an_identity_that_is_used_again_is_a_new_node(table: InodeTable) -> None:
    top = table.note_lookup(table.root, b"x", (1, 2), directory=True)
    old = table.note_lookup(top, b"a", (1, 3), directory=False)
    table.note_removal(top, b"a", (1, 3), last=True)
    new = table.note_lookup(top, b"a", (1, 3), directory=False)
    assert new is not old
    assert new.number != old.number
    assert (old.links, table.get(old.number)) == ([], old)
    table.forget(old.number, 1)
    assert table.find((1, 3)) is new


def test_a_directory_stays_while_something_in_it_is_known(table: InodeTable) -> None:
    top = table.note_lookup(table.root, b"x", (1, 2), directory=True)
    folder = table.note_lookup(top, b"d", (1, 3), directory=True)
    leaf = table.note_lookup(folder, b"f", (1, 4), directory=False)
    table.forget(top.number, 1)
    table.forget(folder.number, 1)
    assert (leaf.path, leaf.dataset(), len(table)) == (b"x/d/f", top, 4)
    leaf.handles.add(7)
    table.forget(leaf.number, 1)
    assert len(table) == 4
    table.note_close(leaf, 7)
    assert len(table) == 1


def test_renaming(table: InodeTable) -> None:
    top = table.note_lookup(table.root, b"x", (1, 2), directory=True)
    other = table.note_lookup(table.root, b"y", (1, 5), directory=True)
    folder = table.note_lookup(top, b"d", (1, 3), directory=True)
    leaf = table.note_lookup(folder, b"f", (1, 4), directory=False)
    assert leaf.is_in(top)
    assert table.note_rename((top, b"d"), (other, b"e"), (1, 3)) is folder
    assert (leaf.path, leaf.dataset()) == (b"y/e/f", other)
    assert leaf.is_in(other)
    assert not leaf.is_in(top)
    assert table.note_rename((top, b"?"), (other, b"?"), (1, 99)) is None
    moved = table.note_lookup(top, b"d2", (1, 3), directory=True)  # behind our back
    assert moved.links == [(top, b"d2")]


def test_what_lies_in_a_dataset_that_is_gone(table: InodeTable) -> None:
    top = table.note_lookup(table.root, b"x", (1, 2), directory=True)
    leaf = table.note_lookup(top, b"f", (1, 4), directory=False)
    table.note_removal(table.root, b"x", (1, 2), last=True)
    for inode in (top, leaf):
        with pytest.raises(StaleError):
            inode.dataset()
    table.forget(leaf.number, 1)
    table.forget(top.number, 1)
    assert len(table) == 1
    assert table.note_removal(table.root, b"x", (1, 2), last=True) is None
