"""Describes samples that could not be read, and makes their errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlfs._native import abi
from dlfs._native.batch import NativeFailure
from dlfs._native.library import describe, error_for
from dlfs.base.wording import quote
from dlfs.directory import FrozenDirectory
from dlfs.errors import DlfsError
from dlfs.fields import FieldSpan


@dataclass(frozen=True, slots=True)
class Where:
    """The names that errors use for a dataset and its members.

    Attributes:
        dataset: name of the dataset.
        members: device URIs of the members, in order.
        span: names of the consecutive fields that are read; empty for whole samples.
        timeout_ms: time within which a read ends, in milliseconds; 0 if it is unknown.
    """

    dataset: str
    members: tuple[str, ...]
    span: FieldSpan = ()
    timeout_ms: int = 0

    @property
    def silence(self) -> str:
        """Reason of a read that its device left unanswered."""
        within = f" within {self.timeout_ms / 1000:g} s" if self.timeout_ms else ""
        return (
            f"expected an answer of the device{within}, got none; until it answers, reads of it "
            "fail at once"
        )


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """A sample that could not be read, and the reason.

    Attributes:
        dataset: name of the dataset.
        path: path of the sample; ``?`` if the directory's names cannot be read either.
        index: index of the sample.
        position: position of the sample in the batch that was requested.
        member: device URI of the member.
        offset_bytes: offset of the sample on the member, in bytes; of its damaged part if ``part``.
        length_bytes: length of the sample in bytes.
        reason: description of the failure.
        code: error code of libdlfs.
        span: names of the fields that were read of the sample; then offset and length are those of
            their bytes. Empty for a whole sample.
        part: the bytes of a large sample that are damaged; empty if the failure is of all of it.
    """

    dataset: str
    path: bytes
    index: int
    position: int
    member: str
    offset_bytes: int
    length_bytes: int
    reason: str
    code: int
    span: FieldSpan = ()
    part: range = range(0)

    def __str__(self) -> str:
        return f"{self._place()}: {self.reason}"

    def _place(self) -> str:
        fields = f"{self._names()} of " if self.span else ""
        part = f"bytes {self.part[0]} to {self.part[-1]} of " if self.part else ""
        return (
            f"{fields}sample {self.index} {quote(self.path)} of dataset {quote(self.dataset)}: "
            f"{self.member} at byte {self.offset_bytes}, {part}{self.length_bytes} bytes"
        )

    def _names(self) -> str:
        names = [f"{name!r}" for name in dict.fromkeys((self.span[0], self.span[-1]))]
        return f"field{'s' if len(names) > 1 else ''} {' to '.join(names)}"

    def error(self, others: int = 0) -> DlfsError:
        """Return the typed error of this failure.

        Args:
            others: number of other samples of the same read that failed.
        """
        more = f" (and {others} more of this batch)" if others else ""
        if self.code == abi.E_CHECKSUM:
            return error_for(self.code, f"read {self}{more}")
        return error_for(self.code, f"read {self._place()}{more}", reason=self.reason)


def describe_failures(
    failures: Sequence[NativeFailure], directory: FrozenDirectory, where: Where
) -> tuple[SampleFailure, ...]:
    """Add the path, member and reason to the failures that libdlfs reported."""
    return tuple(_describe(failure, directory, where) for failure in failures)


def _name(directory: FrozenDirectory, index: int) -> bytes:
    """Return the path of a sample; ``?`` if the names cannot be read."""
    try:
        return directory.name(index)
    except DlfsError:
        return b"?"


def _describe(failure: NativeFailure, directory: FrozenDirectory, where: Where) -> SampleFailure:
    reason = describe(failure.code)
    if failure.code == abi.E_CHECKSUM:
        reason = f"expected CRC32C {failure.crc_expected:08x}, got {failure.crc_got:08x}"
    elif failure.code == abi.E_TIMEOUT:
        reason = where.silence
    return SampleFailure(
        dataset=where.dataset,
        path=_name(directory, failure.index),
        index=failure.index,
        position=failure.position,
        member=where.members[failure.member],
        offset_bytes=failure.offset_bytes,
        length_bytes=int(directory.lengths([failure.index])[0]),
        reason=reason,
        code=failure.code,
        span=where.span,
        part=range(
            failure.part_offset_bytes, failure.part_offset_bytes + failure.part_length_bytes
        ),
    )
