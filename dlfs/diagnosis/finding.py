"""``Finding``: one setting of a machine, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """Severity of a finding; a greater number is worse."""

    OK = 0
    """The setting is as DLFS expects it."""
    NOTE = 1
    """Nothing is wrong; some users may want it otherwise."""
    WARNING = 2
    """DLFS works, but slower, with less memory or less safely."""
    ERROR = 3
    """A part of DLFS does not work."""

    @property
    def label(self) -> str:
        """The name as it is printed."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """One setting of a machine.

    Attributes:
        check: name of the check, such as ``io_uring``.
        severity: how much it matters.
        got: what was found, in a few words.
        source: file, system call or address that it was read from.
        expected: what DLFS wants there; empty if all is well.
        why: what DLFS does without it; empty if all is well.
        fix: command or setting that changes it; empty if all is well.
    """

    check: str
    severity: Severity
    got: str
    source: str
    expected: str = ""
    why: str = ""
    fix: str = ""


def ok(check: str, got: str, source: str) -> Finding:
    """Return the finding of a setting with which all is well."""
    return Finding(check, Severity.OK, got, source)


def problem(
    check: str, severity: Severity, *, got: str, source: str, expected: str, why: str, fix: str
) -> Finding:
    """Return the finding of a setting that may have to be changed."""
    return Finding(check, severity, got, source, expected, why, fix)
