"""Imports ADIOS2 BP files and folders by the package adios2 (extra ``adios2``).

An array is a variable that is one global array or a single value in each step. If several steps
wrote it, the step is its first axis, so that a row is the array of one step. Local arrays, and
variables whose shape changes between steps, are left out.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs.base.closing import closed_on_error
from dlfs.ingest.arrays.file import ArrayFile, ArrayInfo
from dlfs.ingest.arrays.rows import FileOptions

_TYPES = {
    "char": "i1",
    "float": "f4",
    "double": "f8",
    "float complex": "c8",
    "double complex": "c16",
}
"""Types of which numpy has other names; ``int8_t`` is its ``int8``."""


def _dtype(kind: str) -> np.dtype[Any]:
    return np.dtype(_TYPES.get(kind, kind.removesuffix("_t")))


class AdiosFile(ArrayFile):
    """One open BP file; see ``ArrayFile``."""

    def __init__(self, path: str) -> None:
        import adios2

        self._file = adios2.FileReader(path)
        self.arrays: dict[str, ArrayInfo] = {}
        self.skipped: Counter[str] = Counter()
        with closed_on_error(self):
            for name in sorted(self._file.available_variables()):
                self._add(name)

    def read(self, array: ArrayInfo, first: int, out: npt.NDArray[Any]) -> None:
        """Read rows; see ``ArrayFile``."""
        import adios2

        variable = self._file.inquire_variable(array.name)
        if variable.steps() > 1:
            variable.set_step_selection([first, len(out)])
            shape = array.row_shape
            first_row = [0] * len(shape)
        else:
            shape = (len(out), *array.row_shape) if array.shape else ()
            first_row = [first, *[0] * len(array.row_shape)]
        if shape:
            variable.set_selection([first_row, list(shape)])
        self._file.engine.get(variable, out, adios2.bindings.Mode.Sync)

    def read_values(self, array: ArrayInfo, first: int, count: int) -> Sequence[object]:
        """Read values; see ``ArrayFile``."""
        variable = self._file.inquire_variable(array.name)
        return [
            self._file.read(variable, step_selection=[step, 1])
            for step in range(first, first + count)
        ]

    def close(self) -> None:
        """Close the file; see ``ArrayFile``."""
        self._file.close()

    def _add(self, name: str) -> None:
        import adios2

        variable = self._file.inquire_variable(name)
        steps, place = variable.steps(), variable.shape_id()
        kinds = adios2.bindings.ShapeID
        if place not in (kinds.GlobalArray, kinds.GlobalValue):
            self.skipped["local array"] += 1
            return
        shape = tuple(variable.shape())
        if any(tuple(variable.shape(step)) != shape for step in range(1, steps) if shape):
            self.skipped["array whose shape changes"] += 1
            return
        axes = (steps, *shape) if steps > 1 else shape
        kind = variable.type()
        if kind == "string":
            self.arrays[name] = ArrayInfo(name, np.dtype(np.uint8), axes, kind="text")
        else:
            problem = self._uncovered(name, steps, shape)
            self.arrays[name] = ArrayInfo(name, _dtype(kind), axes, problem=problem)

    def _uncovered(self, name: str, steps: int, shape: tuple[int, ...]) -> str:
        """Return what the blocks of an array lack; the library leaves memory there as it is."""
        total = math.prod(shape)
        for step in range(steps if shape else 0):
            found = sum(map(math.prod, self._block_shapes(name, step)))
            if found < total:
                return (
                    f"step {step}: expected {total} elements, got blocks of {found}: the others "
                    "were never written, and the format has no fill value"
                )
        return ""

    def _block_shapes(self, name: str, step: int) -> Iterator[tuple[int, ...]]:
        """Yield the shapes of the blocks that were written of an array in a step."""
        variable = self._file.inquire_variable(name)
        if _dtype(variable.type()).itemsize > 1:
            for block in self._file.engine.blocks_info(name, step):
                yield tuple(map(int, block["Count"].split(",")))
            return
        # The package decodes the least and the greatest byte of each block as text, and fails.
        variable.set_step_selection([step, 1])
        for number in itertools.count():
            try:
                variable.set_block_selection(number)
                shape = tuple(variable.count())
            except ValueError:  # there is no such block
                return
            yield shape


class AdiosOptions(FileOptions):
    """Options of ADIOS2 files."""

    file_class = AdiosFile
    packages = ("adios2",)
    extra = "adios2"
