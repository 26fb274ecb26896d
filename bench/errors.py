"""Errors of the benchmarks."""

from __future__ import annotations


class Unavailable(Exception):
    """The machine lacks something that a contender needs; the message says what and how to get it.

    The contender is left out and named in the report. Outside of rounds it ends the benchmark.
    """

    exit_code = 1


class BenchmarkError(Exception):
    """The benchmark cannot continue. Its results up to here are still written."""

    exit_code = 1


class WrongBytesError(BenchmarkError):
    """A contender returned bytes that differ from the source."""

    def __str__(self) -> str:
        return f"wrong bytes: {super().__str__()}"


class BadArgumentError(BenchmarkError):
    """A command-line argument names something that is missing or must not be used."""

    exit_code = 2


class OccupiedError(BadArgumentError):
    """The namespace of ``--target`` contains data that no benchmark wrote."""
