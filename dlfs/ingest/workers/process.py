"""The worker of an import: opens the volume's devices, and imports one part after the other.

``run_worker`` is what every launcher's workers run, in a process of their own or in a program's.
``main`` runs it in a process that ``ProcessLauncher`` has started.

The worker packs the samples of a part (``PartWriter``) into chunks that the coordinator grants, and
reports each step. If it is to end, it drops the step that it is at: another worker begins it again.

Threads: one that packs, those of the source, and that of ``Link``.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from dlfs._native.processes import die_with_parent
from dlfs.block import BlockDevice, open_device
from dlfs.connection.connection import LocalVolume
from dlfs.dataset.part_writer import PartWriter
from dlfs.dataset.step_content import StepContent
from dlfs.dataset.step_writer import SKIPPED
from dlfs.errors import DlfsError, LeaseLostError, NativeError, StaleError, UsageError
from dlfs.format.bad_records import BadReport
from dlfs.format.geometry import ChunkRun, Geometry
from dlfs.ingest.adding import BlockAdder, check_labels
from dlfs.ingest.parts import open_part
from dlfs.ingest.source import SampleBlock, Source, without_first
from dlfs.ingest.workers.import_setup import (
    EMPTY,
    Before,
    ImportSetup,
    decode_before,
    decode_setup,
)
from dlfs.ingest.workers.invitation import VARIABLE, CannotJoinError, Invitation, boot_id
from dlfs.ingest.workers.link import Link, WorkerEndedError
from dlfs.ingest.workers.messages import PROTOCOL_VERSION, Hello, ProgressMade, StartPart
from dlfs.volume.volume import open as open_volume

PROGRESS_S = 0.5
"""Least time between two reports of a part's progress, in seconds."""
ALL_BAD = "100%"
"""Bad records that a worker allows, if the import allows any: the coordinator counts all."""


class NotNeededError(StaleError):
    """The import goes on without this worker; it may need one later."""


OnSamples = Callable[[int, SampleBlock], None]
"""Called with the number of a part and a block of its samples that is being packed."""


class GrantedChunks:
    """The chunks that a worker may write: the ``ChunkSource`` of its part writers.

    Attributes:
        devices: devices of the members, in order.
        geometry: layout of the chunks over the members.
    """

    def __init__(self, link: Link, devices: Sequence[BlockDevice], geometry: Geometry) -> None:
        self._link = link
        self.devices = devices
        self.geometry = geometry

    def take(self, count: int) -> ChunkRun:
        """Return 1 to ``count`` chunks in one run; wait for the coordinator if none is left.

        Raises:
            WorkerEndedError: the worker is to end.
        """
        return self._link.take(count)


def run_worker(
    invitation: Invitation, *, on_samples: OnSamples | None = None, is_process: bool = False
) -> DlfsError | None:
    """Import parts until the coordinator ends the worker.

    Args:
        invitation: from the coordinator.
        on_samples: called with each block that is packed; its data is the source's until the call
            returns.
        is_process: True if the process is nothing but a worker, and may be ended.

    Returns:
        The error with which the import has failed, or the worker was refused; None if it is
        complete.

    Raises:
        CannotJoinError: no coordinator answers.
        DlfsError: the worker failed; the coordinator knows it.
        NotNeededError: the import goes on without it.
        StaleError: the worker is lost: its connection or its right to write has ended.
    """
    with Link(invitation, _hello, ends_process=is_process) as link:
        try:
            _join(link, on_samples)
        except WorkerEndedError as ended:
            if link.is_lost and link.failure is None:
                raise StaleError(f"import as a worker: {ended}") from ended
            link.report_end()  # it was told to end while it opened devices, or has failed
        except (LeaseLostError, CannotJoinError):
            raise  # it could not renew its right to write: another worker takes its part
        except (DlfsError, OSError, MemoryError) as error:
            link.report_failure(error)
            raise
        if link.goes_on:
            raise NotNeededError("import as a worker: the volume has no room for another one now")
        return link.failure


def _join(link: Link, on_samples: OnSamples | None) -> None:
    try:
        welcome = link.welcome()
    except WorkerEndedError as ended:
        if link.failure is None:
            raise CannotJoinError(f"join an import: {ended}", 0) from ended
        raise
    setup = decode_setup(welcome.setup)
    with _devices(setup, welcome.slot) as (devices, geometry):
        link.be_ready(devices)
        chunks = GrantedChunks(link, devices, geometry)
        while (part := link.next_part()) is not None:
            PartImport(link, chunks, setup, part, on_samples).run()
        for device in devices:
            device.end_granted()
        link.report_end()


@contextmanager
def _devices(setup: ImportSetup, slot: int) -> Iterator[tuple[list[BlockDevice], Geometry]]:
    """Open the members of the volume for granted writing."""
    uri = os.fsdecode(setup.volume_uri)
    with open_volume(uri) as volume:
        if volume.uuid != setup.volume_uuid:
            raise UsageError(
                f"join an import: expected volume {setup.volume_uuid} at {uri}, got {volume.uuid}"
            )
        volume.check_writable()
        uris = [member.uri for member in volume.members]
        session = volume.session
        assert isinstance(session, LocalVolume), "a volume of devices"
        geometry = session.generation.geometry
    with ExitStack() as stack:
        devices = []
        for member in uris:
            device = stack.enter_context(closing(open_device(member, writable=True)))
            device.begin_granted(slot)
            devices.append(device)
        yield devices, geometry


class PartImport:
    """The import of one part.

    Args:
        link: connection to the coordinator.
        chunks: where samples are packed.
        setup: what the import's parts have in common.
        part: the part.
        on_samples: see ``run_worker``.
    """

    def __init__(
        self,
        link: Link,
        chunks: GrantedChunks,
        setup: ImportSetup,
        part: StartPart,
        on_samples: OnSamples | None,
    ) -> None:
        self._link, self._chunks, self._setup, self._part = link, chunks, setup, part
        self._on_samples = on_samples
        self._step = 0, 0
        self._step_bad = 0
        self._reported_s = time.monotonic()

    def run(self) -> None:
        """Import the part from the last step on."""
        setup, before = self._setup, decode_before(self._part.before)
        spool = None if setup.spool is None else os.fsdecode(setup.spool)
        source = open_part(
            self._part.description,
            spool=spool,
            spool_bytes=setup.spool_bytes,
            skip_bad=ALL_BAD if setup.skips_bad else None,
        )
        with closing(source):
            writer = PartWriter(
                self._chunks,
                setup.options(),
                self._part.part,
                self._report,
                progress=before.progress(),
                schema=before.known_schema(),
            )
            with writer:
                self._add_blocks(source, writer, before)
                for path in source.empty_directories:
                    writer.add_directory(path)
                left_out = dict(source.skipped)
                if source.empty_directories:
                    left_out[EMPTY] = len(source.empty_directories)
                if left_out:
                    writer.note_cursor({SKIPPED: left_out})

    def _add_blocks(self, source: Source, writer: PartWriter, before: Before) -> None:
        """Add the samples behind the last step."""
        left = before.source_count - _go_on(source, writer)
        adder = BlockAdder(writer, source)
        labels = {os.fsdecode(name): label for name, label in self._setup.labels.items()}
        self._bad = source.bad
        with closing(source.blocks(layout=writer.layout, seed=self._setup.seed)) as blocks:
            for block in without_first(blocks, left, lambda: source.bad.replace(BadReport())):
                check_labels(block, labels, source.name)
                if self._on_samples is not None:
                    self._on_samples(self._part.part, block)
                if (added := adder.add(block)) is not None:
                    self._step = self._step[0] + added[0], self._step[1] + added[1]
                    self._report_progress()
                if block.ends_step:
                    self._link.wait_for_commits()  # the source deletes what they have, then
        writer.bad = source.bad.report_since_opening(shown=True) + source.bad.report_of_opening()

    def _report(self, content: StepContent) -> None:
        self._step_bad += content.bad.count
        self._step = 0, 0
        self._link.report(content)

    def _report_progress(self) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s >= PROGRESS_S:
            self._reported_s = now_s
            bad = max(0, self._bad.report_since_opening().count - self._step_bad)
            self._link.report_progress(ProgressMade(self._part.part, *self._step, bad))


def _go_on(source: Source, writer: PartWriter) -> int:
    """Have a source go on behind the last step; return the samples that it will not yield.

    If bad records are allowed, it goes on at its last cursor, or reads all again.
    """
    if not source.bad.are_allowed:
        return source.seek(writer.source_count, writer.cursor)
    cursor = writer.cursor
    sought = 0 if cursor is None else source.seek(cursor.count, cursor)
    source.bad.restore(BadReport(), 0)
    return sought


def _hello(secret: bytes) -> Hello:
    return Hello(
        PROTOCOL_VERSION,
        str(sys.modules["dlfs"].__version__),  # an import of dlfs would point up (layers)
        secret,
        platform.node()[:256],
        boot_id(),
        os.getpid(),
    )


def main() -> None:
    """Run a worker that the process with the given ID has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator ends this process
    die_with_parent(int(sys.argv[1]))
    logging.basicConfig(format="%(message)s")
    try:
        run_worker(Invitation.parse(os.environ.pop(VARIABLE)), is_process=True)
    except StaleError:
        sys.exit(2)  # the coordinator knows why
    except (DlfsError, OSError, MemoryError) as error:
        if isinstance(error, NativeError):
            raise
        logging.warning("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
