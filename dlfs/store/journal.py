"""Reads the journals of unfinished imports from the devices of a volume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dlfs.errors import FormatError
from dlfs.format.catalog import DatasetRecord
from dlfs.format.geometry import DataSpace
from dlfs.format.journal import STEP_HEADER_BYTES, StepHeader, decode_step_header
from dlfs.format.paths import display
from dlfs.store.chunk_reader import CopyOrder, copy_orders, read_blocks, read_into
from dlfs.store.transaction import Generation


@dataclass(frozen=True, slots=True)
class Step:
    """A step of an unfinished import, and where its journal has it.

    Attributes:
        header: its header.
        address: address of the header in the space of the journal runs.
    """

    header: StepHeader
    address: int


def read_steps(
    generation: Generation, record: DatasetRecord, known: Sequence[Step] = ()
) -> list[Step]:
    """Read the headers of all steps of an unfinished import.

    Args:
        generation: generation that has the record.
        record: record of the import.
        known: the first of its steps, whose headers are not read again.

    Raises:
        FormatError: a header is malformed in all copies; the message names where.
        DeviceError: a read failed.
    """
    space = DataSpace(generation.geometry, record.journal_runs)
    read_header = partial(_read_header, generation, space, record)
    return list_steps(record, generation.geometry.chunk_bytes, known, read_header)


def list_steps(
    record: DatasetRecord,
    chunk_bytes: int,
    known: Sequence[Step],
    read_header: Callable[[int, int], StepHeader],
) -> list[Step]:
    """Return all steps of an unfinished import.

    Args:
        record: record of the import.
        chunk_bytes: chunk size of the volume.
        known: the first of its steps, whose headers are not read again.
        read_header: returns the header at an address of the journal, of the step with a number.

    Raises:
        FormatError: they are not those of the record.
        DlfsError: as ``read_header``.
    """
    steps = [*known]
    address = 0
    if steps:
        last = steps[-1]
        address = last.address + -(-last.header.step_bytes // chunk_bytes) * chunk_bytes
    while address < record.journal_bytes:
        header = read_header(address, len(steps))
        steps.append(Step(header, address))
        address += -(-header.step_bytes // chunk_bytes) * chunk_bytes
    counted = sum(step.header.sample_count for step in steps)
    if address != record.journal_bytes or counted != record.sample_count:
        raise FormatError(
            f"read the journal of {display(record.name)!r}: expected {record.sample_count} samples "
            f"in {record.journal_bytes} bytes, got {counted} in {address}"
        )
    return steps


def _read_header(
    generation: Generation, space: DataSpace, record: DatasetRecord, address: int, number: int
) -> StepHeader:
    member, offset_bytes = space.resolve(address)
    where = (
        f"the journal of {display(record.name)!r}, on {generation.devices[member].uri} at byte "
        f"{offset_bytes}"
    )
    problem: FormatError | None = None
    for choice in copy_orders(generation.geometry):
        data = read_blocks(generation.sources, space, address, STEP_HEADER_BYTES, choice)
        try:
            return decode_step_header(data.tobytes(), record.uuid, number, where)
        except FormatError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def segments_bytes(generation: Generation, step: Step) -> int:
    """Return the length of a step's segments in whole blocks, for ``read_step``."""
    block, length = generation.geometry.block_bytes, step.header.step_bytes - STEP_HEADER_BYTES
    return -(-length // block) * block


def read_step(
    generation: Generation,
    record: DatasetRecord,
    step: Step,
    memory: NDArray[np.uint8],
    choice: CopyOrder,
) -> None:
    """Read the entries part, the names part and the attribute segment of a step, unverified.

    Args:
        generation: generation that has the record.
        record: record of the import.
        step: one of its steps.
        memory: ``uint8[segments_bytes]``, aligned blocks, which are filled.
        choice: order in which copies are read.
    """
    space = DataSpace(generation.geometry, record.journal_runs)
    read_into(generation.sources, space, step.address + STEP_HEADER_BYTES, memory, choice)
