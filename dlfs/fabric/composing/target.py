"""Declares the target on which namespaces are composed."""

from __future__ import annotations

from typing import Protocol, Self

from dlfs.errors import NotFoundError
from dlfs.fabric.composing.namespaces import ComposedNamespace, NamespaceRequest, check_name


class ComposingTarget(Protocol):
    """A target of a storage node, on which namespaces are composed.

    Each method raises a ``DlfsError`` that names the target and what it refused. Every method may
    be called again after a failure or a lost connection: what is there already stays as it is.
    """

    def list(self) -> list[ComposedNamespace]:
        """Return the composed namespaces, by name."""

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
            size_bytes: new size, a multiple of 1 MiB.
            shrink: allow a smaller size, which loses the bytes behind it.
        """

    def withdraw(self, name: str, *, delete: bool = False) -> ComposedNamespace:
        """End the export of a namespace; its hosts lose it at once.

        Args:
            name: its name.
            delete: also delete its bytes. Else a later ``create`` exports them again.
        """

    def close(self) -> None:
        """Close the connection to the target. Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def find(target: ComposingTarget, name: str, what: str) -> ComposedNamespace:
    """Return the composed namespace of a name.

    Raises:
        NotFoundError: there is none; ``what`` names the target in the message.
    """
    check_name(name)
    known = target.list()
    for each in known:
        if each.name == name:
            return each
    names = ", ".join(each.name for each in known) or "none"
    raise NotFoundError(f"{what}: expected a composed namespace, got {name!r}; there are: {names}")
