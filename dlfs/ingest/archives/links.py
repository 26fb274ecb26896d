"""Resolves symbolic links inside archives without unpacking them.

The archives' members make one tree. A link is followed in it as the kernel would: relative to its
own folder, through other links, to a file or to a folder with all files under it. A link out of the
tree is an error.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from dlfs.errors import DlfsError, FormatError, LimitError, UsageError
from dlfs.ingest.source import check_path, show

HOPS_MAX = 40
"""Most links followed for one path. Source: Linux, path_resolution(7)."""
EXPANSIONS_MAX = 1 << 22
"""Most folders that links lead to, in total, because nested links multiply."""


class LinkTree:
    """The tree of the members of archives, with its symbolic links.

    Args:
        files: paths of all samples that are no links.
        folders: paths of the folders that are members themselves.
        links: target text of each symbolic link, by its path.
    """

    def __init__(
        self, files: Collection[bytes], folders: Collection[bytes], links: Mapping[bytes, bytes]
    ) -> None:
        self._files = frozenset(files)
        self._folders = frozenset([b"", *folders])
        self._links = dict(links)
        self._all = sorted([*files, *links])
        self._expansions = 0

    def aliases(self, on_bad: Callable[[bytes, DlfsError], None]) -> Iterator[tuple[bytes, bytes]]:
        """Yield (path of a new sample, path of the sample it stands for) for every link.

        Args:
            on_bad: called with a link and the error that it causes; may raise it.

        Raises:
            UsageError: a link leads to nothing, in a circle, or to a folder that contains it.
            FormatError: a link leads out of the archive.
            LimitError: a path is too long, or nested links multiply beyond the limit.
        """
        for link in sorted(self._links):
            try:
                yield from self._follow(link, link, frozenset(_parents(link)))
            except (FormatError, LimitError, UsageError) as error:
                on_bad(link, error)

    def _follow(
        self, seen: bytes, link: bytes, above: frozenset[bytes]
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield the aliases of the link at ``link``, which was reached by the path ``seen``."""
        target = self._resolve(link)
        check_path(seen, "import")
        if target in self._files:
            yield seen, target
            return
        if target in above:
            raise UsageError(f"import: {show(link)}: the symbolic link leads to a folder above it")
        self._expansions += 1
        if self._expansions > EXPANSIONS_MAX:
            raise LimitError(f"import: {show(link)}: expected fewer nested symbolic links")
        found = list(self._under(target))
        if not found and target not in self._folders:
            raise UsageError(f"import: {show(link)}: the symbolic link leads to nothing")
        for path in found:
            inside = seen + b"/" + path[len(target) :].lstrip(b"/")
            if path in self._links:
                between = frozenset(p for p in _parents(path) if len(p) >= len(target))
                yield from self._follow(inside, path, above | between)
            else:
                check_path(inside, "import")
                yield inside, path

    def _under(self, folder: bytes) -> Iterable[bytes]:
        prefix = folder + b"/" if folder else b""
        first = bisect_left(self._all, prefix)
        while first < len(self._all) and self._all[first].startswith(prefix):
            yield self._all[first]
            first += 1

    def _resolve(self, link: bytes) -> bytes:
        """Return the path, free of links, that a link leads to."""
        pending, done, hops = link.split(b"/")[::-1], list[bytes](), 0
        while pending:
            part = pending.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":
                if not done:
                    raise self._outside(link)
                done.pop()
                continue
            text = self._links.get(b"/".join([*done, part]))
            if text is None:
                done.append(part)
                continue
            hops += 1
            if hops > HOPS_MAX:
                raise UsageError(f"import: {show(link)}: the symbolic link leads back to itself")
            if text.startswith(b"/"):
                raise self._outside(link)
            pending.extend(text.split(b"/")[::-1])
        return b"/".join(done)

    def _outside(self, link: bytes) -> FormatError:
        return FormatError(f"import: {show(link)}: the symbolic link leads out of the archive")


def _parents(path: bytes) -> Iterator[bytes]:
    """Yield the folders above a path, including the root (empty)."""
    parts = path.split(b"/")
    for count in range(len(parts)):
        yield b"/".join(parts[:count])
