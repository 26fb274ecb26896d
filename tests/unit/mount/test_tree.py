"""The tree of a dataset against a model: nested dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlfs.directory import DirectoryBuilder, FrozenDirectory, Location
from dlfs.errors import FormatError, NotFoundError, StaleError
from dlfs.mount.inode_numbers import FILE_DEPTH
from dlfs.mount.tree import TOP, DatasetTree, TreeNode

Model = dict[bytes, "Model | None"]
"""A directory: its entries, a file being None."""

component = st.binary(min_size=1, max_size=4).filter(
    lambda raw: not set(raw) & {0, ord("/")} and raw not in (b".", b"..")
)
component = component | st.sampled_from([b"a", b"a-", b"a.", b"a0", b"b", b"\xff"])


def frozen(paths: Sequence[bytes]) -> FrozenDirectory:
    builder = DirectoryBuilder()
    for path in paths:
        if path.endswith(b"/"):
            builder.add_directory(path[:-1])
        else:
            builder.add(path, Location(0, 0, 0))
    parts = builder.freeze(UUID(int=5), 0, chunk_bytes=4096)
    return FrozenDirectory(parts.entries, lambda: parts.names)


def model_of(wanted: Sequence[Sequence[bytes]]) -> Model:
    """A tree with these paths, but for those that would lie below a file or be a directory's.

    A path that ends with ``b"/"`` is a directory.
    """
    top: Model = {}
    for path in wanted:
        at: Model | None = top
        for name in path[:-1]:
            at = None if at is None else at.setdefault(name, {})
        if at is not None and path[-1] == b"/":
            continue
        if at is not None:
            at.setdefault(path[-1], None)
    return top


def paths_of(model: Model, prefix: bytes = b"") -> list[bytes]:
    found: list[bytes] = []
    if prefix and not model:
        return [prefix]
    for name, below in model.items():
        found += [prefix + name] if below is None else paths_of(below, prefix + name + b"/")
    return sorted(found)


def names_in(tree: DatasetTree, node: TreeNode) -> list[bytes]:
    children = list(tree.children(node))
    for number in range(0, len(children), 1 + len(children) // 20):
        resumed = tree.children(node, children[number].next_index)
        assert list(resumed) == children[number + 1 :]
    return [child.name for child in children]


def check(tree: DatasetTree, node: TreeNode, model: Model, seen: dict[TreeNode, bytes]) -> None:
    assert sorted(names_in(tree, node)) == sorted(model)
    for name, below in model.items():
        child = tree.child(node, name)
        assert (child.depth == FILE_DEPTH) == (below is None)
        assert tree.parent(child) == node
        assert tree.child(child, b".") == child
        assert tree.child(child, b"..") == node
        path = tree.path(child)
        assert path == (tree.path(node) + b"/" + name).removeprefix(b"/")
        assert seen.setdefault(child, path) == path
        if below is not None:
            check(tree, child, below, seen)
    for name in (b"absent", name_after(model), b"x" * 255):
        if name not in model:
            with pytest.raises(NotFoundError):
                tree.child(node, name)


def check_children(directory: FrozenDirectory, model: Model, prefix: bytes = b"") -> None:
    """Compare the listings of the directory itself, which are in order, from any child on."""
    expected = sorted(name + b"/" if below is not None else name for name, below in model.items())
    entries = list(directory.children(prefix))
    assert [e.name + b"/" if e.is_directory else e.name for e in entries] == expected
    for at, entry in enumerate(entries):
        assert list(directory.children(prefix, entry.name)) == entries[at + 1 :]
        path = prefix + b"/" + entry.name if prefix else entry.name
        below = model[entry.name]
        assert directory.is_directory(path) == (below is not None)
        if below is not None:
            check_children(directory, below, path)


def name_after(model: Model) -> bytes:
    return max(model, default=b"") + b"0"


@settings(max_examples=60)
@given(st.lists(st.lists(component, min_size=1, max_size=5), max_size=40), st.integers(0, 40))
def test_tree_is_the_model(wanted: list[list[bytes]], directories: int) -> None:
    model = model_of([[*path, b"/"] if i < directories else path for i, path in enumerate(wanted)])
    directory = frozen(paths_of(model))
    directory.verify()
    tree = DatasetTree(directory)
    check_children(directory, model)
    check(tree, TOP, model, {})


def test_listing_resumes_anywhere() -> None:
    paths = [b"%04d" % i for i in range(3000)] + [
        b"d%d/x/%d" % (i, j) for i in range(5) for j in range(9)
    ]
    tree = DatasetTree(frozen(paths))
    names = names_in(tree, TOP)
    assert names == sorted([*paths[:3000], *(b"d%d" % i for i in range(5))])
    for position in (2999, 0, 17, 3000, 1500):
        assert next(tree.children(TOP, position)).name == names[position]
    assert list(tree.children(TOP, len(paths))) == []


def test_numbers_from_elsewhere_are_stale() -> None:
    tree = DatasetTree(frozen([b"a/b"]))
    for node in (TreeNode(2, 1), TreeNode(3, 0), TreeNode(4000, 0)):
        with pytest.raises(StaleError):
            tree.path(node)
    with pytest.raises(StaleError):
        tree.path(TreeNode(FILE_DEPTH, 1))
    with pytest.raises(StaleError):
        tree.sample(1)


def test_samples_by_index() -> None:
    builder = DirectoryBuilder()
    builder.add(b"a", Location(0, 5, 7))
    parts = builder.freeze(UUID(int=5), 4096, chunk_bytes=4096)
    tree = DatasetTree(FrozenDirectory(parts.entries, lambda: parts.names))
    assert tree.sample(0) == (5, 7)


def test_empty_dataset() -> None:
    tree = DatasetTree(frozen([]))
    assert names_in(tree, TOP) == []
    with pytest.raises(NotFoundError):
        tree.child(TOP, b"a")


class Malformed(FrozenDirectory):
    """A directory whose names are not what they should be; checksums do not tell."""

    def __init__(self, names: list[bytes], bounds: dict[bytes, int]) -> None:
        self._malformed = names
        self._bounds = bounds
        self.label = "a directory"

    empty_count = 0

    def __len__(self) -> int:
        return len(self._malformed)

    def names(self, first: int = 0, count: int | None = None) -> list[bytes]:
        return self._malformed[first : first + (count or 1)]

    def name(self, index: int) -> bytes:
        return self._malformed[index]

    def lower_bound(self, path: bytes) -> int:
        return self._bounds.get(path, 0)


@pytest.mark.parametrize("name", [b"", b".", b"..", b"x" * 256, b"a\0b", b"/a", b"../a", b"a/b"])
def test_malformed_names_are_refused(name: bytes) -> None:
    tree = DatasetTree(Malformed([name], {}))
    with pytest.raises(FormatError):
        next(tree.children(TOP))


def test_names_outside_their_directory_are_refused() -> None:
    tree = DatasetTree(Malformed([b"a/b", b"c"], {b"a0": 2}))
    with pytest.raises(FormatError, match="out of order"):
        next(tree.children(TreeNode(2, 0), 1))
