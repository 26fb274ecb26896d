"""When a target does what wrong: a script of faults, each a small object.

A ``Fault`` says when (which event, on which command, the how-many-eth time or with what chance)
and what: an action, which makes other steps of the steps of an honest answer (``faults``).

Chance comes from one seed per script; a script's text says the seed and what it did, for the
message of a test that fails.

    FaultScript([Fault(Event.READ, Cut(100, reset=True), nth=3)], seed=7)
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dlfs.testing.nvme.command import Command, Event
from dlfs.testing.nvme.pdu import Wire
from dlfs.testing.nvme.server import Connection, Script, Step, Wait

_LOG_KEPT = 200


@dataclass(frozen=True)
class Scene:
    """Where an action takes place."""

    wire: Wire
    chance: random.Random
    command: Command | None


class Action(ABC):
    """Makes other steps of an answer's."""

    @abstractmethod
    def play(self, steps: Sequence[Step], scene: Scene, /) -> Iterable[Step]:
        """The steps to take instead."""


@dataclass(frozen=True)
class Fault:
    """When what goes wrong.

    Attributes:
        on: the event.
        do: what happens to its answer.
        nth: the first occurrence that it happens to, from 1.
        times: so many occurrences from then on; None: all.
        chance: of each of these, 0..1.
        match: fields of the command and their values, such as ``{"cdw11": 0x1C}``.
    """

    on: Event
    do: Action
    nth: int = 1
    times: int | None = 1
    chance: float = 1.0
    match: Mapping[str, int] = field(default_factory=dict)

    def concerns(self, event: Event, command: Command | None) -> bool:
        """Whether it may happen here."""
        if event != self.on:
            return False
        return all(getattr(command, name, None) == value for name, value in self.match.items())


@dataclass(frozen=True)
class Fragments:
    """How everything is cut that a target sends.

    Attributes:
        sizes: of the pieces in bytes, over and over; the rest of an answer goes in one piece after
            ``pieces_max``.
        pause_ms: between two pieces, so that they arrive apart.
        pieces_max: of one answer.
    """

    sizes: Sequence[int]
    pause_ms: float = 0
    pieces_max: int = 1 << 20

    def cut(self, data: bytes | bytearray) -> Iterator[bytes | Wait]:
        """The pieces of an answer."""
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
    """Keep answers back until there are several, then send them together.

    Attributes:
        count: of answers; fewer are sent when no more came within ``wait_ms``.
        order: in which they go.
    """

    count: int
    order: Literal["same", "reversed", "random"] = "same"
    wait_ms: float = 5

    def play(self, steps: Sequence[Step], scene: Scene, /) -> Iterable[Step]:
        """Never asked: it takes more than one answer."""
        raise NotImplementedError


class FaultScript(Script):
    """Plays faults.

    Args:
        faults: each is looked at for every answer; those that are due act one after the other.
        seed: of all chance.
        fragments: how everything is cut that is sent.

    Attributes:
        played: faults that have happened.
        log: the first of them, in words.

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
        """Wait until so many faults have happened; False when they did not in time."""
        with self._happened:
            return self._happened.wait_for(lambda: self.played >= count, timeout_s)

    def _note(self, what: str) -> None:
        with self._happened:
            self.played += 1
            if len(self.log) < _LOG_KEPT:
                self.log.append(what)
            self._happened.notify_all()

    def play(
        self,
        event: Event,
        steps: Sequence[Step],
        connection: Connection,
        command: Command | None = None,
    ) -> Iterable[Step]:
        """The steps to take instead."""
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
        """How to cut what is sent."""
        return None if self.fragments is None else self.fragments.cut(data)

    def _gather(
        self, action: Gather, steps: Sequence[Step], connection: Connection
    ) -> Sequence[Step]:
        held = connection.gathered
        held.append(list(steps))
        if len(held) < action.count:
            if len(held) == 1:
                connection.post_later(action.wait_ms / 1000, lambda: self._release(action, held))
            return []
        return self._release(action, held)

    def _release(self, action: Gather, held: list[list[Step]]) -> list[Step]:
        answers = list(held)
        held.clear()
        if action.order == "reversed":
            answers.reverse()
        elif action.order == "random":
            self._chance.shuffle(answers)
        return [step for answer in answers for step in answer]
