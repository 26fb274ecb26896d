"""Finds the object of a framework that calls an adapter.

Some frameworks decide by themselves what an adapter has to know, and hand it nothing that says so.
The object that decides is then found in the frames of the callers.
"""

from __future__ import annotations

import sys
from typing import Any

_DEPTH_MAX = 40
"""Most callers that are searched."""


def find_caller(*modules: str) -> Any:
    """Return the ``self`` of the nearest caller whose code is in one of some modules, or None."""
    if not any(name in sys.modules for name in modules):
        return None
    frame = sys._getframe(1)
    for _ in range(_DEPTH_MAX):
        if frame.f_globals.get("__name__") in modules:
            return frame.f_locals.get("self")
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
