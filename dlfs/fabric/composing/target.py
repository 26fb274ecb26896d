"""The target of a storage node, on which namespaces are composed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from dlfs.errors import NotFoundError
from dlfs.fabric.composing.namespaces import (
    ComposedNamespace,
    NamespaceRequest,
    check_name,
    check_resize,
)


class ComposingTarget(ABC):
    """A target of a storage node, on which namespaces are composed.

    Each method raises a ``DlfsError`` that names the target and what it refused. Every method may
    be called again after a failure or a lost connection: what is there already stays as it is.

    Args:
        what: the action and the target, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    @abstractmethod
    def list(self) -> list[ComposedNamespace]:
        """Return the composed namespaces, by name."""

    @abstractmethod
    def create(self, request: NamespaceRequest) -> ComposedNamespace:
        """Create and export a namespace; if it exists, make its hosts those of the request.

        A file or lvol of that name that exists already is exported with its contents.

        Raises:
            ExistsError: it exists with another size, or the NQN belongs to something else.
        """

    def resize(self, name: str, size_bytes: int, *, shrink: bool = False) -> ComposedNamespace:
        """Change the size of a namespace, while hosts use it.

        Args:
            name: its name.
            size_bytes: new size, a multiple of 1 MiB; SPDK rounds it up to whole clusters of the
                lvol store.
            shrink: allow a smaller size, which loses the bytes behind it.
        """
        found = self._find(name)
        check_resize(found, size_bytes, shrink=shrink)
        self._resize(found, size_bytes)
        return self._find(name)

    def withdraw(self, name: str, *, delete: bool = False) -> ComposedNamespace:
        """End the export of a namespace; its hosts lose it at once.

        On SPDK the discovery service's listener stays, for other exports.

        Args:
            name: its name.
            delete: also delete its bytes. Else a later ``create`` exports them again.
        """
        found = self._find(name)
        self._withdraw(found, delete=delete)
        return found

    def close(self) -> None:
        """Close the connection to the target, if one stays open. Idempotent."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def _resize(self, found: ComposedNamespace, size_bytes: int) -> None:
        """Change the size of a namespace; the size was checked."""

    @abstractmethod
    def _withdraw(self, found: ComposedNamespace, *, delete: bool) -> None:
        """End the export of a namespace, and delete its bytes if that is wanted."""

    def _find(self, name: str) -> ComposedNamespace:
        """Return the composed namespace of a name.

        Raises:
            NotFoundError: there is none.
        """
        check_name(name)
        known = self.list()
        for each in known:
            if each.name == name:
                return each
        names = ", ".join(each.name for each in known) or "none"
        raise NotFoundError(
            f"{self._what}: expected a composed namespace, got {name!r}; there are: {names}"
        )
