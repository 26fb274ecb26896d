"""``PartWriter``: writes the samples of one part of a source, as a worker of an import.

A worker has no lock of the volume. It writes the data of its steps to chunks that the coordinator
of the import has granted it, and reports each step as a ``StepContent``. The coordinator, which
alone commits, adds the steps to the import (``PartsWriter``). Steps are cut as a ``StepWriter``
cuts them, and their samples are packed as it packs them.

Threads: one at a time. Memory: as a ``StepBuilder``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self
from uuid import UUID

from dlfs.base.arguments import Layout
from dlfs.base.wording import quote
from dlfs.connection.unfinished import PartProgress
from dlfs.dataset.sample_packer import STAGE_BYTES_ORDERED, STAGE_BYTES_SHUFFLED, ChunkSource
from dlfs.dataset.schema import Schema
from dlfs.dataset.step_builder import StepBuilder
from dlfs.dataset.step_content import StepContent, StepEnd
from dlfs.dataset.step_cutter import STEP_BYTES, StepCutter
from dlfs.errors import ClosedError
from dlfs.format.bad_records import BadReport
from dlfs.format.journal import Cursor
from dlfs.format.paths import PathLike
from dlfs.store.sample_buffer import SampleBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What all parts of an import have in common; a worker gets it from the coordinator.

    Attributes:
        name: name of the dataset.
        uuid: UUID of the dataset.
        layout: order in which samples are packed.
        seed: seed of the shuffled order.
        source_shuffled: True if samples arrive in a shuffled order and are packed in it.
        step_bytes: bytes of samples after which a step ends.
        stage_bytes: size of a window of the shuffle, in bytes.
        defaults: value of each attribute for samples that are added without it.
    """

    name: bytes
    uuid: UUID
    layout: Layout
    seed: int
    source_shuffled: bool = False
    step_bytes: int = STEP_BYTES
    stage_bytes: int = STAGE_BYTES_SHUFFLED
    defaults: Mapping[str, Any] = field(default_factory=dict)


class PartWriter(StepCutter):
    """Writes the samples of one part. A context manager: a clean exit ends the part.

    Args:
        chunks: the chunks that the worker may write; ``take`` asks the coordinator for more.
        options: what all parts of the import have in common.
        part: number of the part.
        on_step: called with each step when its data is durable; what it raises ends the part. The
            next step begins when it returns.
        progress: what the committed steps have of the part.
        schema: what the samples before have, of any part; None without any.

    Attributes:
        source_count: samples of the part that its steps have used. The caller adds those that
            follow.
        cursor: the last cursor that the source gave for them; its count is of samples of the part.
        bad_so_far: bad records in the part of the source that this writer has used.
        bad: all bad records that the caller has found, if it adds them before the end of the part:
            the last step reports those that no step before has.
        previous: None; a ``StepWriter`` has the version that is appended to here.

    Raises:
        DlfsError: as ``StepBuilder``. After an error the part is to be begun again after the last
            step that was committed.
    """

    previous = None

    def __init__(
        self,
        chunks: ChunkSource,
        options: ImportOptions,
        part: int,
        on_step: Callable[[StepContent], None],
        *,
        progress: PartProgress | None = None,
        schema: Schema | None = None,
    ) -> None:
        by_batches = options.source_shuffled and options.layout != "path"
        super().__init__(step_bytes=options.step_bytes, by_batches=by_batches)
        self._chunks, self._options, self._on_step = chunks, options, on_step
        self.part = part
        done = progress or PartProgress()
        self.source_count = done.source_count
        self.cursor: Cursor | None = done.cursor
        self.layout: Layout = options.layout
        self.bad = BadReport()
        self._number, self._windows = done.step_count, done.window_count
        self._schema = schema
        self._reported_bad = BadReport()
        shuffles = options.layout == "shuffled" and not options.source_shuffled
        self._stage = SampleBuffer(options.stage_bytes if shuffles else STAGE_BYTES_ORDERED)
        self._builder: StepBuilder | None = None
        self._state = "open"

    def __repr__(self) -> str:
        name = quote(self._options.name)
        return f"<PartWriter of part {self.part} of {name}: step {self._number}, {self._state}>"

    @property
    def schema(self) -> Schema | None:
        """What the samples so far have; None before the first one."""
        return (self._builder and self._builder.schema) or self._schema

    def expect(self, schema: Schema) -> None:
        """Expect what the samples of other parts have. Call it before the first sample is added."""
        self._schema = schema

    def find_known(self, paths: Sequence[bytes]) -> set[bytes]:
        """Return those of some paths that samples of the present step have."""
        return set() if self._builder is None else {p for p in paths if p in self._builder}

    def kept_paths(self) -> Iterator[bytes]:
        """Yield no path: those of other steps are compared when the import is sealed."""
        return iter(())

    def add_directory(self, path: PathLike) -> None:
        """Add a directory; see ``DatasetWriter.add_directory``."""
        self._opened().add_directory(path)

    # ---- steps -----------------------------------------------------------------------------------

    @property
    def _present(self) -> StepBuilder | None:
        return self._builder

    def _opened(self) -> StepBuilder:
        if self._state != "open":
            raise ClosedError(
                f"write part {self.part} of {quote(self._options.name)}: the writer is "
                f"{self._state}"
            )
        if self._builder is None:
            options = self._options
            self._builder = StepBuilder(
                self._chunks,
                name=options.name,
                uuid=options.uuid,
                stage=self._stage,
                layout=options.layout,
                seed=options.seed,
                source_shuffled=options.source_shuffled,
                part=self.part,
                part_windows=self._windows,
                defaults=options.defaults,
                schema=self._schema,
            )
        return self._builder

    def _end_step(self, *, ends_part: bool) -> None:
        builder = self._opened()
        self._schema = builder.schema or self._schema
        end = StepEnd(source_count=self.source_count, cursor=self.cursor, ends_part=ends_part)
        found = self.bad if ends_part and self.bad.count else self.bad_so_far
        content = replace(
            builder.finish(end), number=self._number, bad=found.without_first(self._reported_bad)
        )
        self._reported_bad = found
        self._number, self._windows = self._number + 1, content.window_count
        self._builder = None
        builder.close()
        if ends_part:
            self._state = "complete"
        self._on_step(content)

    def end_part(self) -> None:
        """Report the last step of the part, also if it has no samples. Idempotent."""
        if self._state != "complete":
            self._end_step(ends_part=True)

    def abort(self) -> None:
        """Discard the samples since the last step. Idempotent."""
        if self._state == "open":
            self._state = "aborted"
        builder, self._builder = self._builder, None
        if builder is not None:
            builder.close()
        self._stage = SampleBuffer(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        try:
            if kind is None and self._state == "open":
                self.end_part()
        finally:
            self.abort()
