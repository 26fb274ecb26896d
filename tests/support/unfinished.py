"""Begins imports that are not finished."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from uuid import UUID

import numpy as np

import dlfs
from dlfs.format.catalog import DatasetRecord
from dlfs.format.journal import Term

LATER_TAG = 9, b"of a later version"
TERM = Term(bytes(range(16)), 42_000)

STEP_BYTES = 24_000


def step_samples(step: int) -> dict[bytes, bytes]:
    """Return the samples of a step of an import: small ones, and one of several chunks."""
    samples = {b"%d/%d" % (step, i): bytes([16 * step + i]) * 400 * i for i in range(5)}
    return {**samples, b"%d/large" % step: bytes(range(200)) * 100}


def step_columns(step: int) -> dict[str, list[object]]:
    """Return the attributes of these samples, in their order."""
    return {"step": [step] * 6, "text": [f"text {number}" for number in range(6)]}


def step_cursor(step: int) -> dict[str, object] | None:
    """Return the cursor of the source behind a step; every other one has none."""
    return None if step % 2 else {"object": f"ä{step}", "record": 6}


def commit_unfinished(
    volume: dlfs.Volume,
    name: str,
    steps: int = 2,
    uuid: UUID | None = None,
    *,
    granted: int = 0,
) -> DatasetRecord:
    """Commit the first steps of an import that is not finished; return its record.

    Args:
        volume: the volume.
        name: name of the dataset that is imported.
        steps: number of its steps.
        uuid: UUID of the dataset; by default always the same one.
        granted: number of chunks that workers of it may write.
    """
    origin = {"source": "a test", "fingerprint": "1"}
    uuid = uuid or UUID(int=77)
    writer = volume.step_writer(name, origin, step_bytes=STEP_BYTES, layout="path", uuid=uuid)
    for step in range(steps):
        paths, parts = zip(*step_samples(step).items(), strict=True)
        lengths = np.array(list(map(len, parts)))
        columns = {key: np.array(values) for key, values in step_columns(step).items()}
        offsets = np.cumsum(lengths) - lengths
        writer.add_batch(
            paths, b"".join(parts), offsets, lengths, attributes=columns, cursor=step_cursor(step)
        )
    writer.abort()
    with volume._transaction("a test") as transaction:
        record = transaction.base.catalog.find_unfinished(name.encode())
        assert record is not None
        runs = tuple(transaction.space.take_all(granted))
        tags = (*record.tags, *((TERM.tag,) if granted else ()), LATER_TAG)
        tagged = replace(record, tags=tags, granted_runs=runs)
        transaction.commit(removed=[record], added=[tagged])
    volume.refresh()
    return tagged


Step = tuple[dict[bytes, bytes], dict[str, list[object]], tuple[int, object]]


def steps_of(count: int) -> Iterator[Step]:
    """Yield the samples and the attributes of each step, in path order, and the last cursor."""
    for step in range(count):
        samples, columns = step_samples(step), step_columns(step)
        order = sorted(range(len(samples)), key=list(samples).__getitem__)
        in_order = {name: [values[i] for i in order] for name, values in columns.items()}
        last = step - step % 2
        yield dict(sorted(samples.items())), in_order, (6 * (last + 1), step_cursor(last))
