"""What a target may do wrong: a script of faults, each a small object.

A ``Fault`` says when (which event, on which command, the how-many-eth time or with what chance)
and what: an action, which makes other steps of the steps of an honest answer. Actions know PDUs and
frames, nothing of connections, so that each is a few lines and can be combined.

Chance comes from one seed per script; a script's text says the seed and what it did, for the
message of a test that fails.

    FaultScript([Fault(Event.READ, Cut(100, reset=True), nth=3)], seed=7)
"""

from __future__ import annotations

import dataclasses
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dlfs.testing.nvme.command import Command, Event
from dlfs.testing.nvme.pdu import (
    R2T,
    C2HData,
    CapsuleResp,
    Frame,
    Pdu,
    Wire,
    frame_of,
    sign_header,
)
from dlfs.testing.nvme.server import Close, Connection, Mute, Script, Step, Wait

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


class FaultScript(Script):
    """Plays faults.

    Args:
        faults: each is looked at for every answer; those that are due act one after the other.
        seed: of all chance.
        fragments: how everything is cut that is sent.

    Threads: the target's; others may read ``log`` at any time.
    """

    def __init__(
        self, faults: Sequence[Fault] = (), *, seed: int = 0, fragments: Fragments | None = None
    ) -> None:
        self.faults = tuple(faults)
        self.fragments = fragments
        self.seed = seed
        self.log: list[str] = []
        self._chance = random.Random(seed)
        self._seen = [0] * len(self.faults)

    def __repr__(self) -> str:
        return f"<FaultScript seed {self.seed}, {self.faults}; done: {self.log}>"

    @property
    def played(self) -> int:
        """Faults that happened."""
        return len(self.log)

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
                if len(self.log) < _LOG_KEPT:
                    self.log.append(f"connection {connection.number}, {event.value}: {fault.do}")
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


# ---- whole answers -------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Omit(Action):
    """Leave out PDUs of a kind; None: everything."""

    kind: type[Pdu] | None = None

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """What is left."""
        return [step for step in steps if self.kind and not isinstance(step, self.kind)]


@dataclass(frozen=True)
class Repeat(Action):
    """Send PDUs of a kind twice."""

    kind: type[Pdu]

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """Each of the kind, and again."""
        for step in steps:
            yield step
            if isinstance(step, self.kind):
                yield step


@dataclass(frozen=True)
class Insert(Action):
    """Send something more: before the answer, or after it."""

    extra: Step
    before: bool = False

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """The answer and the rest."""
        return [self.extra, *steps] if self.before else [*steps, self.extra]


@dataclass(frozen=True)
class Silence(Action):
    """Send nothing on this connection any more."""

    def play(self, _steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """Silence."""
        return [Mute()]


@dataclass(frozen=True)
class Delay(Action):
    """Everything on this connection waits."""

    seconds: float

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """The answer, later."""
        return [Wait(self.seconds), *steps]


@dataclass(frozen=True)
class Cut(Action):
    """Close the connection after so many bytes of the answer; negative: that many before its end.

    With ``reset`` by RST.
    """

    after_bytes: int = 0
    reset: bool = False

    def play(self, steps: Sequence[Step], scene: Scene, /) -> Iterable[Step]:
        """A part, and the end."""
        return [_encoded(steps, scene)[: self.after_bytes], Close(reset=self.reset)]


@dataclass(frozen=True)
class Drip(Action):
    """Send the answer piece by piece, slowly."""

    fragments: Fragments

    def play(self, steps: Sequence[Step], scene: Scene, /) -> Iterable[Step]:
        """The pieces."""
        return self.fragments.cut(_encoded(steps, scene))


@dataclass(frozen=True)
class Garbage(Action):
    """Send random bytes instead."""

    count: int

    def play(self, _steps: Sequence[Step], scene: Scene, /) -> Iterable[Step]:
        """The bytes."""
        return [scene.chance.randbytes(self.count)]


# ---- fields --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plus:
    """A value relative to the right one, modulo ``1 << bits``."""

    amount: int
    bits: int = 16

    def of(self, value: int) -> int:
        """The value."""
        return (value + self.amount) & ((1 << self.bits) - 1)


def _changed(value: Any, change: Any) -> Any:
    return change.of(value) if isinstance(change, Plus) else change


@dataclass(frozen=True)
class Change(Action):
    """Change fields of every PDU of a kind, before digests are made."""

    kind: type[Pdu]
    fields: Mapping[str, Any]

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """The answer with other values."""
        for step in steps:
            if isinstance(step, self.kind):
                changed = {
                    name: _changed(getattr(step, name), value)
                    for name, value in self.fields.items()
                }
                yield dataclasses.replace(step, **changed)
            else:
                yield step


@dataclass(frozen=True)
class ChangeHeader(Action):
    """Change fields of the first frame of a kind; header digests are right again."""

    kind: type[Pdu]
    fields: Mapping[str, int | Plus]

    def play(self, steps: Sequence[Step], scene: Scene, /) -> Iterable[Step]:
        """The answer with another header."""

        def change(frame: Frame) -> None:
            for name, value in self.fields.items():
                setattr(frame, name, _changed(getattr(frame, name), value))
            if frame.header_digest:
                sign_header(frame)

        return _with_first(self.kind, steps, scene, change)


@dataclass(frozen=True)
class Complete(Action):
    """Change the completion; where the SUCCESS flag stood for it, there is one now.

    Attributes:
        status: status code type << 8 | status code, with DNR as 0x4000 and More as 0x2000.
        value: dwords 0 and 1.
        head: SQHD.
        phase: the bit that Fabrics reserve.
        with_data: data goes before it all the same.
    """

    status: int | None = None
    value: int | None = None
    head: int | Plus | None = None
    cid: int | Plus | None = None
    phase: int = 0
    with_data: bool = True

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """The answer with another completion."""
        for step in steps:
            if isinstance(step, C2HData):
                if self.with_data:
                    yield dataclasses.replace(step, success=False)
                if step.success:
                    yield self._entry(step.cccid.to_bytes(2, "little").rjust(14, b"\0") + b"\0\0")
            elif isinstance(step, CapsuleResp):
                yield self._entry(step.entry)
            else:
                yield step

    def _entry(self, entry: bytes) -> CapsuleResp:
        def word(at: int, change: int | Plus | None) -> bytes:
            value = int.from_bytes(entry[at : at + 2], "little")
            value = value if change is None else _changed(value, change)
            return int(value).to_bytes(2, "little")

        value = entry[:8] if self.value is None else self.value.to_bytes(8, "little")
        status = None if self.status is None else self.status << 1
        found = int.from_bytes(word(14, status), "little") | self.phase
        tail = word(8, self.head) + entry[10:12] + word(12, self.cid)
        return CapsuleResp(value + tail + found.to_bytes(2, "little"))


@dataclass(frozen=True)
class Patch(Action):
    """Overwrite a part of the data for the host; its digest fits."""

    at: int
    data: bytes

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """The answer with other data."""
        for step in steps:
            if isinstance(step, C2HData):
                data = bytearray(step.data)
                start = self.at - step.offset
                if 0 <= start <= len(data) - len(self.data):
                    data[start : start + len(self.data)] = self.data
                yield dataclasses.replace(step, data=bytes(data))
            else:
                yield step


# ---- digests -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpoilHeaderDigest(Action):
    """Flip one bit of the header digest of the first PDU of a kind."""

    kind: type[Pdu]

    def play(self, steps: Sequence[Step], scene: Scene, /) -> Iterable[Step]:
        """The answer with a wrong digest."""

        def spoil(frame: Frame) -> None:
            frame.header_digest = _flipped(frame.header_digest, scene.chance)

        return _with_first(self.kind, steps, scene, spoil)


@dataclass(frozen=True)
class SpoilDataDigest(Action):
    """Flip one bit of the data digest of the first data; or, with ``data``, one of the data."""

    data: bool = False

    def play(self, steps: Sequence[Step], scene: Scene, /) -> Iterable[Step]:
        """The answer with data and digest that do not fit."""

        def spoil(frame: Frame) -> None:
            if self.data:
                frame.data = _flipped(bytes(frame.data), scene.chance)
            else:
                frame.data_digest = _flipped(frame.data_digest, scene.chance)

        return _with_first(C2HData, steps, scene, spoil)


# ---- how data is cut into PDUs -------------------------------------------------------------------

Recutting = Literal[
    "halves",
    "reversed",
    "overlapping",
    "twice",
    "gap",
    "short",
    "excess",
    "beyond",
    "no last",
    "early last",
    "success early",
]


@dataclass(frozen=True)
class Recut(Action):
    """Cut the data of a read into PDUs in another way.

    ``halves`` is honest. The rest is not: ``reversed`` order, ``overlapping`` halves, the first
    half ``twice``, a ``gap`` between them, the second half missing (``short``), bytes after the end
    (``excess``), a half that begins at the end (``beyond``), no LAST, LAST in the first half,
    SUCCESS in the first half.
    """

    way: Recutting

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """The answer in other pieces."""
        for step in steps:
            if isinstance(step, C2HData):
                yield from self._pieces(step)
            else:
                yield step

    def _pieces(self, whole: C2HData) -> list[C2HData]:
        data = bytes(whole.data)
        half = len(data) // 8 * 4

        def part(start: int, end: int, **fields: Any) -> C2HData:
            return dataclasses.replace(
                whole, offset=whole.offset + start, data=data[start:end], **fields
            )

        first = part(0, half, last=False, success=False)
        rest = part(half, len(data))
        excess = dataclasses.replace(whole, data=data + bytes(512))
        beyond = dataclasses.replace(rest, offset=whole.offset + len(data))
        ways: dict[str, list[C2HData]] = {
            "halves": [first, rest],
            "reversed": [
                part(half, len(data), last=False, success=False),
                part(0, half),
            ],
            "overlapping": [first, part(half - 4, len(data))],
            "twice": [first, first, rest],
            "gap": [first, part(half + 4, len(data))],
            "short": [dataclasses.replace(first, last=True, success=whole.success)],
            "excess": [excess],
            "beyond": [first, beyond],
            "no last": [first, dataclasses.replace(rest, last=False, success=False)],
            "early last": [dataclasses.replace(first, last=True), rest],
            "success early": [dataclasses.replace(first, last=True, success=True), rest],
        }
        return ways[self.way]


@dataclass(frozen=True)
class SplitR2T(Action):
    """Ask for the data in so many R2Ts at once, whatever the host allows."""

    count: int

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """The R2Ts."""
        for step in steps:
            if not isinstance(step, R2T):
                yield step
                continue
            size = step.length // self.count // 4 * 4
            for number in range(self.count):
                start = step.offset + number * size
                end = start + size if number < self.count - 1 else step.offset + step.length
                yield R2T(step.cccid, (step.tag + number) & 0xFFFF, start, end - start)


# ---- parts ---------------------------------------------------------------------------------------


def _encoded(steps: Sequence[Step], scene: Scene) -> bytes:
    found = b""
    for step in steps:
        if isinstance(step, bytes):
            found += step
        elif isinstance(step, Frame):
            found += step.encode()
        elif not isinstance(step, Wait | Close | Mute):
            found += frame_of(step, scene.wire).encode()
    return found


def _with_first(
    kind: type[Pdu], steps: Sequence[Step], scene: Scene, change: Any
) -> Iterator[Step]:
    done = False
    for step in steps:
        if not done and isinstance(step, kind):
            frame = frame_of(step, scene.wire)
            change(frame)
            done = True
            yield frame
        else:
            yield step


def _flipped(data: bytes, chance: random.Random) -> bytes:
    if not data:
        return data
    found = bytearray(data)
    bit = chance.randrange(len(found) * 8)
    found[bit // 8] ^= 1 << bit % 8
    return bytes(found)
