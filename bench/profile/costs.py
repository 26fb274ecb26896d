"""Costs by place in the code, from the output of perf.

``perf script`` prints samples, each with a stack, innermost frame first. A sample in the kernel
keeps all frames of the kernel, because the callers of ``memcpy`` show its purpose. A sample in user
space keeps only the innermost frame, because libraries are built without frame pointers. For
libdlfs, debug information gives the source file of an address, also of inlined code.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

KERNEL_START = 1 << 63
"""Lowest address of the kernel."""

_HEAD = re.compile(r"\s*(\d+)\s+(\d+)\s*$")
_FRAME = re.compile(r"\s+([0-9a-f]+) (.*) \((.*)\)$")


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the code that has costs.

    Attributes:
        process: process ID.
        object: name of the library or program; ``kernel``.
        file: source file; empty if unknown.
        function: innermost function.
        callers: for a place in the kernel: the functions that called it, innermost first.
    """

    process: int
    object: str
    file: str
    function: str
    callers: tuple[str, ...] = ()


Costs = Counter[Place]


@dataclass(frozen=True, slots=True)
class _Stack:
    process: int
    weight: int
    frames: tuple[tuple[int, str, str], ...]
    """Address, symbol and object of each frame, innermost first; a user address is an offset."""


def parse_perf(text: str, library: str = "") -> Costs:
    """Read the output of ``perf script -F pid,period,ip,sym,dso``.

    Addresses in ``library``, a path, are looked up in debug information.
    """
    stacks = list(_stacks(text))
    sources = _sources(stacks, library)
    costs: Costs = Counter()
    for stack in stacks:
        costs[_place(stack, sources)] += stack.weight
    return costs


def _stacks(text: str) -> Iterable[_Stack]:
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line.strip()]
        if not lines:
            continue
        head = _HEAD.match(lines[0])
        frames = [_FRAME.match(line) for line in lines[1:]]
        if head is None or None in frames:
            raise ValueError(f"read perf's samples: expected a stack, got {block!r}")
        yield _Stack(
            int(head[1]),
            int(head[2]),
            tuple((int(frame[1], 16), frame[2], frame[3]) for frame in frames if frame),
        )


def _source(path: str) -> str:
    """Return a source file's name after that of its folder, as "nvme/queue.c"."""
    return "/".join(PurePath(path).parts[-2:])


def _place(stack: _Stack, sources: Mapping[tuple[str, int], tuple[str, str]]) -> Place:
    if not stack.frames:
        return Place(stack.process, "unknown", "", "unknown")
    address, symbol, path = stack.frames[0]
    if address >= KERNEL_START:
        names = [name for at, name, _ in stack.frames if at >= KERNEL_START]
        return Place(stack.process, "kernel", "", names[0], tuple(names[1:]))
    name = PurePath(path).name
    file, function = sources.get((name, address), ("", symbol))
    return Place(stack.process, name, file, function)


def _sources(stacks: Iterable[_Stack], library: str) -> dict[tuple[str, int], tuple[str, str]]:
    """Look up file and function of the addresses in a library, by its name and the address."""
    name = PurePath(library).name
    wanted = {
        stack.frames[0][0]
        for stack in stacks
        if stack.frames and PurePath(stack.frames[0][2]).name == name
    }
    found = look_up(library, sorted(wanted))
    return {(name, address): source for address, source in found.items()}


def look_up(path: str, addresses: list[int]) -> dict[int, tuple[str, str]]:
    """Look up file and innermost function of addresses of an object, also of inlined code.

    The result is empty if addr2line or the debug information is missing.
    """
    tool = shutil.which("addr2line")
    if tool is None or not addresses:
        return {}
    done = subprocess.run(
        [tool, "--exe", path, "--functions"],
        input="".join(f"{address:#x}\n" for address in addresses),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    if len(lines) != 2 * len(addresses):
        return {}
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return {
        address: (_source(place.rpartition(":")[0]), function)
        for address, (function, place) in zip(addresses, pairs, strict=True)
        if not place.startswith("??")
    }
