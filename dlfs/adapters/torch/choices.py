"""Which samples a loader or sampler goes over, and in which order, as users choose it."""

from __future__ import annotations

from typing import Any

import numpy as np

Choice = dict[str, Any]
"""The arguments ``where``, ``weights``, ``draws`` and ``order`` of ``Dataset.batches`` given."""


def copy_choice(**chosen: Any) -> Choice:
    """Return the arguments that are not None; arrays are copied, since states depend on them."""
    return {
        name: value if isinstance(value, str | int) else np.array(value)
        for name, value in chosen.items()
        if value is not None
    }
