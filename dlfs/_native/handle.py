"""The owners of native objects and descriptors, which an exception at any moment leaves sound.

Python runs signal handlers between two bytecodes, also when a call returns. So Ctrl-C may raise
between the call that creates an object and the assignment of its result, and between the call that
destroys it and the line that forgets it. An owner excludes both:

- It exists before what it owns. A ``Handle`` is the slot that a C function writes its object into.
  A ``Descriptor`` is the slot of a descriptor; ``fill`` calls a function such as ``os.open`` and
  stores its result in one step, without a bytecode in between.
- C empties the slot and then destroys the object, so that it is destroyed once.
- An owner that is collected frees what it owns without running any bytecode, because an exception
  in a finalizer is lost and leaves the finalizer undone. Its ``__del__`` is a function of C.
- An owner refers to the owners of all that its object uses. A call refers to the owner while it is
  under way. So no object is destroyed before its last user, whatever is closed or collected first:
  to close an object that others use is to drop the reference. Owners are invisible to the cyclic
  garbage collector, which would finalize those of a cycle in any order.

Threads: any. At the end of the interpreter, memory and threads are left to the system: owners stay,
with what they refer to, because threads still use it.

Source: ``dlfs/handle.h``.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable
from ctypes import addressof, c_int, c_void_p, py_object
from functools import partial
from itertools import starmap
from typing import Any

from dlfs._native.library import library

PROCESS_ANY = (1 << 32) - 1
"""Number of a process for objects that every forked child may destroy (``DLFS_PROCESS_ANY``)."""

untrack = ctypes.PYFUNCTYPE(None, py_object)(("PyObject_GC_UnTrack", ctypes.pythonapi))
_bind = ctypes.PYFUNCTYPE(py_object, py_object)(("PyInstanceMethod_New", ctypes.pythonapi))
_add_reference = ctypes.PYFUNCTYPE(None, py_object)(("Py_IncRef", ctypes.pythonapi))


def process_number() -> int:
    """Return the number of this process: forks between the loading of libdlfs and this process."""
    number: int = library().dlfs_handle_process()
    return number


class Handle(c_void_p):
    """The owner of a native object: an output argument for the function that creates it.

    Args:
        destroy: function of libdlfs, or of another library, that destroys the object.
        keeps: owners of the objects that this one uses, and objects whose memory it uses.
        process: number of the process that may destroy the object.

    Attributes:
        free: destroys the object now, if the slot is not empty. No call may use it any more.
        keeps: as given.
    """

    __slots__ = ("__del__", "free", "keeps")

    free: Callable[[], None]
    keeps: tuple[object, ...]

    def __init__(
        self, destroy: Callable[..., Any], *keeps: object, process: int = PROCESS_ANY
    ) -> None:
        self.keeps = keeps
        self.free = self.__del__ = partial(
            library().dlfs_handle_free, addressof(self), destroy, process
        )
        untrack(self)


def owner_type(destroy: Callable[..., Any]) -> Callable[[], c_void_p]:
    """Return a type of owners that are made at less cost than a ``Handle``.

    Such an owner destroys its object when it is collected, and only then. Each new one must be
    given to ``untrack``.

    Args:
        destroy: function of libdlfs that destroys the object, and does nothing with NULL.
    """

    class Owner(c_void_p):
        __slots__ = ()

    # A function of C is no method: wrapped, it gets the owner, of which it takes the value.
    Owner.__del__ = _bind(destroy)  # type: ignore[attr-defined]
    _owner_types.append(Owner)
    return Owner


class Descriptor(c_int):
    """The owner of a file descriptor; -1 while it has none.

    Attributes:
        close: closes the descriptor. Idempotent. Safe as the last use of the owner, as in
            ``owners.pop().close()``.
    """

    __slots__ = ()

    close: Callable[[], None]

    def __init__(self) -> None:
        c_int.__init__(self, -1)  # super() needs a class cell, which ctypes cannot copy
        if "close" not in Descriptor.__dict__:  # libdlfs is loaded at its first use
            prototype = ctypes.CFUNCTYPE(None, ctypes.POINTER(c_int))
            close = _bind(prototype(("dlfs_handle_close", library())))
            Descriptor.close = Descriptor.__del__ = close  # type: ignore[attr-defined]

    def fill(self, make: Callable[..., int], *arguments: object, **options: object) -> int:
        """Own the descriptor that a function of C returns, such as ``os.open``; return it too.

        The owner must have none.
        """
        call = partial(make, **options) if options else make
        # C calls the function and stores its result: no signal handler runs in between.
        next(map(setattr, (self,), ("value",), starmap(call, (arguments,))))
        return self.value

    def fileno(self) -> int:
        """Return the descriptor, for functions that take an object with one."""
        return self.value

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


_owner_types: list[type] = [Handle, Descriptor]


def _stay_at_exit() -> None:
    """Keep all owners from now on, instead of freeing what they own when they are collected."""

    def stay(self: object, add_reference: Callable[[object], None] = _add_reference) -> None:
        add_reference(self)

    for owner in _owner_types:
        owner.__del__ = stay  # type: ignore[attr-defined]


atexit.register(_stay_at_exit)
