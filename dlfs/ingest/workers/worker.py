"""``Worker``: what a worker of an import may do, as the coordinator's messages say.

A state machine without I/O, threads or a clock: its caller tells it what came and what time it is,
sends what ``take_messages`` returns, and limits the writes of its devices to ``deadline_s``.
``process`` is the caller that has a socket, devices and a source.

A worker has one part at a time. It writes to chunks that it was granted, each once, and only while
it has the right to write: the right ends ``valid_s`` after the request for it was sent. It asks for
the next chunks when half of the last ones are used, so that it need not wait for them. It reports a
step when the data of the step is on the devices, and goes on with the next one; but it does not
report more than ``UNCOMMITTED_MAX`` steps that are not committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dlfs.dataset.step_content import StepContent
from dlfs.errors import FormatError
from dlfs.format.geometry import ChunkRun
from dlfs.ingest.workers.coordinator import UNCOMMITTED_MAX
from dlfs.ingest.workers.messages import (
    AnyMessage,
    End,
    Ended,
    Failed,
    Granted,
    Hello,
    NeedChunks,
    ProgressMade,
    Ready,
    Renew,
    Renewed,
    StartPart,
    StepCommitted,
    StepMade,
    Welcome,
)

ANSWER_S = 60.0
"""Longest wait for the answer to ``Hello``, in seconds."""
RENEWALS_MAX = 64
"""Most requests for time whose answers may still come; older ones are forgotten."""


@dataclass(frozen=True)
class Outgoing:
    """A message to send.

    Attributes:
        message: the message.
        is_urgent: True if it goes before messages that wait.
    """

    message: AnyMessage
    is_urgent: bool = False


class Worker:
    """The rights and duties of a worker.

    Args:
        hello: what it says of itself.
        now_s: the time, before ``hello`` is sent.

    Attributes:
        welcome: the coordinator's answer; None before.
        part: the part that it has; None between two.
        deadline_s: end of its right to write; None if it has none yet, or it does not end.
        deadline_request: number of the request for time that was answered by this deadline.
        is_permitted: True if it may write, as long as the deadline has not passed.
        end: why it is to end; None before.
        failure: the error with which it is to end; None without.
        goes_on: True if it is to end and the import goes on without it.
        is_lost: True if it is to end because it has no right to write any more.
    """

    def __init__(self, hello: Hello, now_s: float) -> None:
        self.welcome: Welcome | None = None
        self.part: StartPart | None = None
        self.deadline_s: float | None = None
        self.deadline_request = 0
        self.is_permitted = False
        self.end: str | None = None
        self.failure: Failed | None = None
        self.goes_on = False
        self.is_lost = False
        self._began_s = now_s
        self._messages: deque[Outgoing] = deque([Outgoing(hello)])
        self._renewals: dict[int, float] = {}
        self._renewed_s = now_s
        self._next_renewal = 1
        self._first_renewal: int | None = None
        self._runs: deque[ChunkRun] = deque()
        self._granted = 0  # chunks of the last grant
        self._has_asked = self._is_waiting = False
        self._uncommitted: deque[tuple[int, int]] = deque()

    # ---- what comes ------------------------------------------------------------------------------

    def receive(self, message: AnyMessage, now_s: float) -> None:
        """Take a message of the coordinator.

        Raises:
            FormatError: a sound coordinator does not send it now.
        """
        if isinstance(message, End):
            self.end = self.end or message.reason
            self.failure, self.goes_on = message.failure, message.goes_on
        elif isinstance(message, Welcome) and self.welcome is None:
            self.welcome = message
        elif self.welcome is None or isinstance(message, Welcome):
            raise self._not_expected(message)
        elif isinstance(message, StartPart) and self.part is None:
            self.part = message
            self._messages.append(Outgoing(ProgressMade(message.part, 0, 0, 0)))  # it has begun
        elif isinstance(message, Granted):
            self._has_asked = self._is_waiting = False
            runs = [ChunkRun(first, count) for first, count in message.runs]
            self._runs.extend(runs)
            self._granted = sum(run.chunk_count for run in runs)
        elif isinstance(message, Renewed) and message.number in self._renewals:
            self._extend(message.number, self._renewals.pop(message.number), message.valid_s)
        elif isinstance(message, Renewed):
            return  # an answer to a request that is forgotten
        elif isinstance(message, StepCommitted) and self._uncommitted:
            if self._uncommitted.popleft() != (message.part, message.number):
                raise self._not_expected(message)
        else:
            raise self._not_expected(message)
        self.check_time(now_s)

    def leave(self, reason: str) -> None:
        """Take note of the end of the connection."""
        self.end = self.end or reason
        self.is_lost = True

    def check_time(self, now_s: float) -> None:
        """Do what is due: ask for more time; end if there is none left."""
        welcome = self.welcome
        if welcome is None:
            if now_s - self._began_s >= ANSWER_S:
                self.leave(f"the coordinator did not answer for {ANSWER_S:g} s")
            return
        if self.deadline_s is not None and now_s >= self.deadline_s:
            self.leave("its right to write has ended: the coordinator did not renew it in time")
        elif now_s - self._renewed_s >= welcome.renew_s and self.end is None:
            self._renew(now_s)

    def _renew(self, now_s: float) -> None:
        """Ask for more time."""
        self._renewed_s = now_s
        self._renewals[self._next_renewal] = now_s
        if len(self._renewals) > RENEWALS_MAX:
            del self._renewals[min(self._renewals)]
        self._messages.append(Outgoing(Renew(self._next_renewal), is_urgent=True))
        self._next_renewal += 1

    def next_time(self) -> float:
        """Return the time at which ``check_time`` is to be called at the latest."""
        if self.welcome is None:
            return self._began_s + ANSWER_S
        due_s = self._renewed_s + self.welcome.renew_s
        return due_s if self.deadline_s is None else min(due_s, self.deadline_s)

    def take_messages(self) -> list[Outgoing]:
        """Return the messages that are to be sent now."""
        found = list(self._messages)
        self._messages.clear()
        return found

    def be_ready(self, keys: Sequence[bytes | None], now_s: float) -> None:
        """Report that the devices are open, and ask for the right to write.

        Args:
            keys: key of this host at the target of each member; None where it has none.
            now_s: the time, after the devices were opened.
        """
        self._first_renewal = self._next_renewal
        self._messages.append(Outgoing(Ready(list(keys))))
        self._renew(now_s)

    # ---- what the packing of samples asks --------------------------------------------------------

    @property
    def has_chunks(self) -> bool:
        """True if ``take`` would return chunks."""
        return bool(self._runs)

    def ask_for_chunks(self, count: int, *, is_waiting: bool) -> None:
        """Have chunks asked for, unless they are already.

        Args:
            count: number of chunks that are needed.
            is_waiting: True if nothing can be packed before they are there.
        """
        if not self._has_asked or (is_waiting and not self._is_waiting):
            self._has_asked, self._is_waiting = True, is_waiting
            self._messages.append(Outgoing(NeedChunks(max(1, count), is_waiting)))

    def take(self, count: int) -> ChunkRun:
        """Return the next granted chunks, 1 to ``count`` of them; ``has_chunks`` must be true."""
        run = self._runs.popleft()
        if run.chunk_count > count:
            self._runs.appendleft(ChunkRun(run.first_chunk + count, run.chunk_count - count))
            run = ChunkRun(run.first_chunk, count)
        left = sum(each.chunk_count for each in self._runs)
        if left < self._granted // 2:
            self.ask_for_chunks(1, is_waiting=False)
        return run

    @property
    def may_report(self) -> bool:
        """True if another step may be reported before one is committed."""
        return len(self._uncommitted) < UNCOMMITTED_MAX

    @property
    def is_committed(self) -> bool:
        """True if all steps that were reported are committed."""
        return not self._uncommitted

    def report(self, content: StepContent) -> None:
        """Report a step of the part whose data is on the devices; ``may_report`` must be true."""
        self._uncommitted.append((content.part, content.number))
        self._messages.append(Outgoing(StepMade.of(content)))
        if content.end.ends_part:
            self.part = None

    def report_progress(self, progress: ProgressMade) -> None:
        """Report how far the part is."""
        if self.part is not None and self.part.part == progress.part:
            self._messages.append(Outgoing(progress, is_urgent=False))

    def report_failure(self, failed: Failed) -> None:
        """Report an error that ends the import."""
        self._messages.append(Outgoing(failed))
        self.end = self.end or "it has failed"

    def report_end(self) -> None:
        """Report that no write is in flight any more, and none will follow."""
        self._messages.append(Outgoing(Ended()))

    def _extend(self, number: int, began_s: float, valid_s: float | None) -> None:
        """Extend the right to write by the answer to a request that was sent after ``began_s``."""
        if self.welcome is None or self._first_renewal is None or number < self._first_renewal:
            return
        self.is_permitted = True
        if valid_s is None:
            return
        until_s = began_s + min(valid_s, self.welcome.valid_s)
        if self.deadline_s is None or until_s > self.deadline_s:
            self.deadline_s, self.deadline_request = until_s, number

    def _not_expected(self, message: AnyMessage) -> FormatError:
        return FormatError(f"read a message: got {type(message).__name__}, which is not expected")
