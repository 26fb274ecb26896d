"""Checks a step that a worker reports, before the coordinator of the import commits it.

A worker may run other code, on a host whose memory is damaged. So nothing that it says becomes
part of a volume unchecked, except the bytes of samples: these are verified by the checksums that it
reports, whenever they are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs.base.wording import quote
from dlfs.connection.unfinished import PartProgress, decode_step
from dlfs.dataset.schema import Schema
from dlfs.dataset.step_content import StepContent
from dlfs.errors import FormatError, UsageError
from dlfs.fields import FieldEncoder, find_fields
from dlfs.format.constants import ADDRESS_MAX, PART_MAX
from dlfs.format.journal import (
    CURSOR_BYTES_MAX,
    StepHeader,
    decode_step_header,
    encode_step_header,
)

WINDOWS_MAX = (1 << 32) - 1
"""Most windows of a shuffle in one part: their numbers have 32 bits."""


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """A step that a worker reports.

    Attributes:
        worker: name of the worker.
        content: the step.
    """

    worker: str
    content: StepContent


def check_step(
    report: WorkerStep,
    *,
    name: bytes,
    uuid: UUID,
    chunk_bytes: int,
    progress: PartProgress,
    schema: Schema | None,
) -> Schema | None:
    """Check a step that a worker reports; the chunks are checked by the ``GrantBook``.

    Args:
        report: the step.
        name: name of the dataset.
        uuid: UUID of the dataset.
        chunk_bytes: chunk size of the volume.
        progress: what the steps before have of the part.
        schema: what the samples of all steps before have; None without any.

    Returns:
        What the samples have, these included.

    Raises:
        UsageError, FormatError: the step is wrong; the message names worker and part.
    """
    content = report.content
    what = (
        f"import {quote(name)}: step {content.number} of part {content.part} from worker "
        f"{quote(report.worker)}"
    )
    cursor = content.end.cursor
    sizes = content.sample_count, content.sample_bytes, content.path_bytes
    expected = (
        (all(0 <= size <= ADDRESS_MAX for size in sizes), "counts and sizes", sizes),
        (0 <= content.part <= PART_MAX, f"a part in 0..{PART_MAX}", content.part),
        (not progress.is_complete, "no step of a complete part", content.number),
        (content.number == progress.step_count, f"step {progress.step_count}", content.number),
        (
            progress.source_count <= content.end.source_count <= ADDRESS_MAX,
            f"at least {progress.source_count} samples of the source",
            content.end.source_count,
        ),
        (
            progress.window_count <= content.window_count <= WINDOWS_MAX,
            f"{progress.window_count} windows or more",
            content.window_count,
        ),
        (
            cursor is None or len(cursor.json) <= CURSOR_BYTES_MAX,
            f"a cursor of at most {CURSOR_BYTES_MAX} bytes",
            0 if cursor is None else len(cursor.json),
        ),
        (
            cursor is None or 0 <= cursor.count <= content.end.source_count,
            f"a cursor in the first {content.end.source_count} samples of the source",
            cursor,
        ),
    )
    for is_right, wanted, got in expected:
        if not is_right:
            raise UsageError(f"{what}: expected {wanted}, got {got}")
    try:
        header = content.header(0, 0)
        decode_step_header(encode_step_header(header, uuid), uuid, 0, "a report")
        found = _check_segments(content, header, uuid, chunk_bytes)
    except (FormatError, UsageError) as error:
        raise type(error)(f"{what}: {error}") from error
    if found is None or schema is None:
        return found or schema
    try:
        schema.check(found, what)
    except UsageError as error:
        error.add_note(
            "samples of different parts of the source differ: give all of them the same "
            "attributes, of the same types"
        )
        raise
    return schema.union(found)


def _check_segments(
    content: StepContent, header: StepHeader, uuid: UUID, chunk_bytes: int
) -> Schema | None:
    """Check directory and attributes of a step; return what its samples have."""
    attributes = [_aligned(part) for part in content.attributes]
    segment = np.concatenate(attributes) if attributes else np.empty(0, np.uint8)
    directory, table = decode_step(
        (_aligned(content.entries), _aligned(content.names), segment), header, uuid, "a report"
    )
    with directory:
        data_bytes = content.chunk_count * chunk_bytes
        got = directory.data_bytes, directory.sample_bytes
        if got != (data_bytes, content.sample_bytes):
            raise FormatError(
                f"expected {content.sample_bytes} bytes of samples in {data_bytes} bytes, got "
                f"{got[1]} in {got[0]}"
            )
        directory.verify()
    if not content.sample_count and not table.head.columns:
        return None
    fields = find_fields(table, np.arange(len(table)), "a report")
    text = FieldEncoder(fields).text if fields else ""
    columns = {column.name: column.dtype for column in table.head.columns}
    return Schema(columns, frozenset(table.dtypes), text if content.sample_count else None)


def _aligned(part: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return bytes at an address that is a multiple of 8."""
    return part if part.ctypes.data % 8 == 0 else part.copy()
