"""The modules of pyarrow, an optional package, each imported when it is first used."""

from __future__ import annotations

import importlib
from typing import Any


class _Module:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


pyarrow: Any = _Module("pyarrow")
compute: Any = _Module("pyarrow.compute")
types: Any = _Module("pyarrow.types")
