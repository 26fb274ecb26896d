"""Samples that could not be read: what is known of them, and the error that tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlfs._native import abi
from dlfs._native.batch import NativeFailure
from dlfs._native.library import describe, error_for
from dlfs.directory import FrozenDirectory
from dlfs.errors import DeviceError, DlfsError, FormatError
from dlfs.wording import quote


@dataclass(frozen=True, slots=True)
class Where:
    """What errors call the things that a reader reads.

    Attributes:
        dataset: its name.
        members: the members' device URIs, in member order.
    """

    dataset: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """A sample that could not be read, and why.

    Attributes:
        dataset: its dataset's name.
        path: its path; ``?`` when the directory's names cannot be read either.
        index: its index.
        position: where it stood in the batch that was asked for.
        member: the member's device URI.
        offset_bytes: where the sample starts on the member.
        length_bytes: of the sample.
        reason: what happened, for people.
        code: libdlfs's code.
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

    def __str__(self) -> str:
        return (
            f"sample {self.index} {quote(self.path)} of dataset {quote(self.dataset)}: "
            f"{self.member} at byte {self.offset_bytes}, {self.length_bytes} bytes: {self.reason}"
        )

    def error(self, others: int = 0) -> DlfsError:
        """The typed error of this failure.

        Args:
            others: how many more samples of the same read failed.
        """
        more = f" (and {others} more of this batch)" if others else ""
        return error_for(self.code, f"read {self}{more}")


def describe_failures(
    failures: Sequence[NativeFailure], directory: FrozenDirectory, where: Where
) -> tuple[SampleFailure, ...]:
    """Name the samples, members and reasons of what libdlfs reported."""
    return tuple(_describe(failure, directory, where) for failure in failures)


def _name(directory: FrozenDirectory, index: int) -> bytes:
    """The path of a sample; ``?`` when that is lost too."""
    try:
        return directory.name(index)
    except (DeviceError, FormatError):
        return b"?"


def _describe(failure: NativeFailure, directory: FrozenDirectory, where: Where) -> SampleFailure:
    reason = describe(failure.code)
    if failure.code == abi.E_CHECKSUM:
        reason = f"expected CRC32C {failure.crc_expected:08x}, got {failure.crc_got:08x}"
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
    )
