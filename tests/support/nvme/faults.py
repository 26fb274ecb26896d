"""The faults of a target: actions that change its answers.

An answer is a sequence of steps: PDUs, frames, bytes, waits, and closing the connection. An action
takes the steps of a correct answer and returns other steps. Actions know PDUs and frames but no
connections.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.support.nvme.pdu import R2T, C2HData, CapsuleResp, Frame, Pdu, frame_of, sign_header
from tests.support.nvme.script import Action, Fragments, Scene
from tests.support.nvme.server import Close, Mute, Step, Wait

# ---- whole answers -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Omit(Action):
    """Omit PDUs of a kind; None: all steps."""

    kind: type[Pdu] | None = None

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """Return the steps without the omitted ones."""
        return [step for step in steps if self.kind and not isinstance(step, self.kind)]


@dataclass(frozen=True)
class Repeat(Action):
    """Send PDUs of a kind twice."""

    kind: type[Pdu]

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """Return the steps with each PDU of the kind twice."""
        for step in steps:
            yield step
            if isinstance(step, self.kind):
                yield step


@dataclass(frozen=True)
class Insert(Action):
    """Send an extra step before the answer or after it."""

    extra: Step
    before: bool = False

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """Return the steps with the extra one."""
        return [self.extra, *steps] if self.before else [*steps, self.extra]


@dataclass(frozen=True)
class Silence(Action):
    """Send nothing on this connection any more."""

    def play(self, _steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """Return a step after which nothing is sent."""
        return [Mute()]


@dataclass(frozen=True)
class Delay(Action):
    """Delay the answer and everything after it on this connection."""

    seconds: float

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """Return a wait and then the answer."""
        return [Wait(self.seconds), *steps]


@dataclass(frozen=True)
class Cut(Action):
    """Close the connection within the answer.

    Attributes:
        after_bytes: bytes of the answer that are sent; negative: that many less than all.
        reset: close it by RST.
    """

    after_bytes: int = 0
    reset: bool = False

    def play(self, steps: Sequence[Step], scene: Scene, /) -> Iterable[Step]:
        """Return the beginning of the answer and a close."""
        return [_encoded(steps, scene)[: self.after_bytes], Close(reset=self.reset)]


@dataclass(frozen=True)
class Drip(Action):
    """Send the answer in small fragments with pauses."""

    fragments: Fragments

    def play(self, steps: Sequence[Step], scene: Scene, /) -> Iterable[Step]:
        """Return the fragments of the answer."""
        return self.fragments.cut(_encoded(steps, scene))


@dataclass(frozen=True)
class Garbage(Action):
    """Send random bytes instead of the answer."""

    count: int

    def play(self, _steps: Sequence[Step], scene: Scene, /) -> Iterable[Step]:
        """Return random bytes."""
        return [scene.chance.randbytes(self.count)]


# ---- fields --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plus:
    """A value relative to the correct one, modulo ``1 << bits``."""

    amount: int
    bits: int = 16

    def of(self, value: int) -> int:
        """Return the changed value."""
        return (value + self.amount) & ((1 << self.bits) - 1)


def _changed(value: Any, change: Any) -> Any:
    return change.of(value) if isinstance(change, Plus) else change


@dataclass(frozen=True)
class Change(Action):
    """Change fields of every PDU of a kind before its digests are computed."""

    kind: type[Pdu]
    fields: Mapping[str, Any]

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """Return the answer with other values."""
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
    """Change fields of the first frame of a kind; its header digest fits the changed header."""

    kind: type[Pdu]
    fields: Mapping[str, int | Plus]

    def play(self, steps: Sequence[Step], scene: Scene, /) -> Iterable[Step]:
        """Return the answer with another header."""

        def change(frame: Frame) -> None:
            for name, value in self.fields.items():
                setattr(frame, name, _changed(getattr(frame, name), value))
            if frame.header_digest:
                sign_header(frame)

        return _with_first(self.kind, steps, scene, change)


@dataclass(frozen=True)
class Complete(Action):
    """Change the completion; replaces the SUCCESS flag by a completion.

    Attributes:
        status: status code type << 8 | status code, with DNR as 0x4000 and More as 0x2000.
        value: dwords 0 and 1.
        head: SQHD.
        phase: the phase bit, which is reserved over fabrics.
        with_data: True to send the command's data before the completion.
    """

    status: int | None = None
    value: int | None = None
    head: int | Plus | None = None
    cid: int | Plus | None = None
    phase: int = 0
    with_data: bool = True

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """Return the answer with another completion."""
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
class Finish(Action):
    """Complete the command at once, without transferring its data in either direction.

    Attributes:
        status: status of the completion, as in ``Complete``.
    """

    status: int = 0

    def play(self, steps: Sequence[Step], scene: Scene, /) -> Iterable[Step]:
        """Return a completion only."""
        if scene.command is None:
            return steps
        cid = scene.command.cid.to_bytes(2, "little")
        return [CapsuleResp(bytes(12) + cid + (self.status << 1).to_bytes(2, "little"))]


@dataclass(frozen=True)
class Patch(Action):
    """Overwrite a range of the data for the host; the digest fits the changed data."""

    at: int
    data: bytes

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """Return the answer with other data."""
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
        """Return the answer with a wrong digest."""

        def spoil(frame: Frame) -> None:
            frame.header_digest = _flipped(frame.header_digest, scene.chance)

        return _with_first(self.kind, steps, scene, spoil)


@dataclass(frozen=True)
class SpoilDataDigest(Action):
    """Flip one bit of the first data PDU: of its digest or, with ``data``, of its data."""

    data: bool = False

    def play(self, steps: Sequence[Step], scene: Scene, /) -> Iterable[Step]:
        """Return the answer with a digest that does not fit the data."""

        def spoil(frame: Frame) -> None:
            if self.data:
                frame.data = _flipped(bytes(frame.data), scene.chance)
            else:
                frame.data_digest = _flipped(frame.data_digest, scene.chance)

        return _with_first(C2HData, steps, scene, spoil)


# ---- splitting data into PDUs --------------------------------------------------------------------

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
    """Split the data of a read into PDUs in another way.

    ``halves`` is valid. All others are not: ``reversed`` order, ``overlapping`` halves, the first
    half ``twice``, a ``gap`` between the halves, the second half missing (``short``), bytes after
    the end (``excess``), a half that begins at the end (``beyond``), no LAST flag, LAST in the
    first half, SUCCESS in the first half.
    """

    way: Recutting

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """Return the answer with its data split."""
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
        second = part(half, len(data))
        excess = dataclasses.replace(whole, data=data + bytes(512))
        beyond = dataclasses.replace(second, offset=whole.offset + len(data))
        ways: dict[str, list[C2HData]] = {
            "halves": [first, second],
            "reversed": [
                part(half, len(data), last=False, success=False),
                part(0, half),
            ],
            "overlapping": [first, part(half - 4, len(data))],
            "twice": [first, first, second],
            "gap": [first, part(half + 4, len(data))],
            "short": [dataclasses.replace(first, last=True, success=whole.success)],
            "excess": [excess],
            "beyond": [first, beyond],
            "no last": [first, dataclasses.replace(second, last=False, success=False)],
            "early last": [dataclasses.replace(first, last=True), second],
            "success early": [dataclasses.replace(first, last=True, success=True), second],
        }
        return ways[self.way]


@dataclass(frozen=True)
class SplitR2T(Action):
    """Request the data with several R2Ts at once, even if the host allows fewer."""

    count: int

    def play(self, steps: Sequence[Step], _scene: Scene, /) -> Iterable[Step]:
        """Return the R2Ts."""
        for step in steps:
            if not isinstance(step, R2T):
                yield step
                continue
            size = step.length // self.count // 4 * 4
            for number in range(self.count):
                start = step.offset + number * size
                end = start + size if number < self.count - 1 else step.offset + step.length
                yield R2T(step.cccid, (step.tag + number) & 0xFFFF, start, end - start)


# ---- encoding ------------------------------------------------------------------------------------


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
