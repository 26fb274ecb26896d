"""Fault scripts: when a target violates the specification, and how.

A ``Fault`` has a condition (an event, fields of the command, the number of its occurrence, a
probability) and an action, which replaces the steps of the answer (``faults``).

All random choices of a script come from one seed. The text of a script contains the seed and the
faults that happened, for the message of a failing test.

    FaultScript([Fault(Event.READ, Cut(100, reset=True), nth=3)], seed=7)
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.support.nvme.command import Command, Event
from tests.support.nvme.pdu import Wire
from tests.support.nvme.server import Connection, Script, Step, Wait

_LOG_LINES_MAX = 200


@dataclass(frozen=True)
class Scene:
    """The circumstances of an answer that an action changes."""

    wire: Wire
    chance: random.Random
    command: Command | None


class Action(ABC):
    """Replaces the steps of an answer."""

    @abstractmethod
    def play(self, steps: Sequence[Step], scene: Scene, /) -> Iterable[Step]:
        """Return the steps to take instead."""


@dataclass(frozen=True)
class Fault:
    """One fault: its condition and its action.

    Attributes:
        on: the event whose answer it changes.
        do: the action.
        nth: number of the first occurrence that it changes, from 1.
        times: number of occurrences from then on; None: all.
        chance: probability at each of these, 0..1.
        match: fields of the command and their values, such as ``{"cdw11": 0x1C}``.
    """

    on: Event
    do: Action
    nth: int = 1
    times: int | None = 1
    chance: float = 1.0
    match: Mapping[str, int] = field(default_factory=dict)

    def concerns(self, event: Event, command: Command | None) -> bool:
        """Return True if the event and the command match."""
        if event != self.on:
            return False
        return all(getattr(command, name, None) == value for name, value in self.match.items())


@dataclass(frozen=True)
class Fragments:
    """The sizes into which a target splits everything that it sends.

    Attributes:
        sizes: sizes of the fragments in bytes, repeated; after ``pieces_max`` fragments the
            remainder of an answer is sent in one.
        pause_ms: pause between two fragments, so that they arrive separately.
        pieces_max: most fragments of one answer.
    """

    sizes: Sequence[int]
    pause_ms: float = 0
    pieces_max: int = 1 << 20

    def cut(self, data: bytes | bytearray) -> Iterator[bytes | Wait]:
        """Return the fragments of an answer, with pauses."""
        at = 0
        for number in range(self.pieces_max):
            if at >= len(data):
                return
            size = self.sizes[number % len(self.sizes)]
            yield bytes(data[at : at + size])
            at += size
            if self.pause_ms and at < len(data):
                yield Wait(self.pause_ms / 1000)
        yield bytes(data[at:])


@dataclass(frozen=True)
class Gather(Action):
    """Delay answers until there are several, then send them together.

    Attributes:
        count: number of answers; fewer are sent if no more came within ``wait_ms``.
        order: order in which they are sent.
    """

    count: int
    order: Literal["same", "reversed", "random"] = "same"
    wait_ms: float = 5

    def play(self, steps: Sequence[Step], scene: Scene, /) -> Iterable[Step]:
        """Never called: ``FaultScript.play`` handles this action for several answers."""
        raise NotImplementedError


class FaultScript(Script):
    """Applies faults to a target's answers.

    Args:
        faults: checked for every answer; those whose condition holds act one after the other.
        seed: seed of all random choices.
        fragments: how everything that is sent is split.

    Attributes:
        played: number of faults that have happened.
        log: descriptions of the first of them.

    Threads: the target's; others may read the attributes at any time.
    """

    def __init__(
        self, faults: Sequence[Fault] = (), *, seed: int = 0, fragments: Fragments | None = None
    ) -> None:
        self.faults = tuple(faults)
        self.fragments = fragments
        self.seed = seed
        self.played = 0
        self.log: list[str] = []
        self._happened = threading.Condition()
        self._chance = random.Random(seed)
        self._seen = [0] * len(self.faults)

    def __repr__(self) -> str:
        return f"<FaultScript seed {self.seed}, {self.faults}; done: {self.log}>"

    def wait(self, count: int = 1, *, timeout_s: float) -> bool:
        """Wait until so many faults have happened; return False after a time-out."""
        with self._happened:
            return self._happened.wait_for(lambda: self.played >= count, timeout_s)

    def _note(self, what: str) -> None:
        with self._happened:
            self.played += 1
            if len(self.log) < _LOG_LINES_MAX:
                self.log.append(what)
            self._happened.notify_all()

    def play(
        self,
        event: Event,
        steps: Sequence[Step],
        connection: Connection,
        command: Command | None = None,
    ) -> Iterable[Step]:
        """Return the steps to take instead."""
        scene = Scene(connection.to_host, self._chance, command)
        for number, fault in enumerate(self.faults):
            if self._is_due(number, event, command):
                self._note(f"connection {connection.number}, {event.value}: {fault.do}")
                if isinstance(fault.do, Gather):
                    steps = self._gather(fault.do, steps, connection)
                else:
                    steps = list(fault.do.play(steps, scene))
        return steps

    def _is_due(self, number: int, event: Event, command: Command | None) -> bool:
        fault = self.faults[number]
        if not fault.concerns(event, command):
            return False
        self._seen[number] += 1
        since = self._seen[number] - fault.nth
        if since < 0 or (fault.times is not None and since >= fault.times):
            return False
        return self._chance.random() < fault.chance

    def pieces(self, _connection: Connection, data: bytearray, /) -> Iterable[bytes | Wait] | None:
        """Return how to split what is sent; None: not at all."""
        return None if self.fragments is None else self.fragments.cut(data)

    def _gather(
        self, action: Gather, steps: Sequence[Step], connection: Connection
    ) -> Sequence[Step]:
        gathered = connection.gathered
        gathered.append(list(steps))
        if len(gathered) < action.count:
            if len(gathered) == 1:
                connection.post_later(
                    action.wait_ms / 1000, lambda: self._release(action, gathered)
                )
            return []
        return self._release(action, gathered)

    def _release(self, action: Gather, gathered: list[list[Step]]) -> list[Step]:
        answers = list(gathered)
        gathered.clear()
        if action.order == "reversed":
            answers.reverse()
        elif action.order == "random":
            self._chance.shuffle(answers)
        return [step for answer in answers for step in answer]
