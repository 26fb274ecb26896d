"""Loads the objects of a checkpoint that are no tensors, without code that their bytes name."""

from __future__ import annotations

import io
from typing import Any

import torch

from dlfs.errors import FormatError

ERROR_CHARACTERS_MAX = 400
"""Most characters of an error of torch in a message."""


def load_restricted(content: io.BytesIO) -> Any:
    """Load an object by torch's unpickler for tensors and plain values.

    Classes that ``torch.serialization.add_safe_globals`` was given are loaded, too.

    Raises:
        FormatError: the bytes name other classes or functions, or are no stored object.
    """
    try:
        return torch.load(content, weights_only=True)
    except Exception as error:  # torch names no classes of errors for damaged input
        text = str(error).rpartition("WeightsUnpickler error:")[2]  # behind torch's advice
        reason = " ".join(text.split())[:ERROR_CHARACTERS_MAX]
        raise FormatError(f"expected tensors and plain values only: {reason}") from error
