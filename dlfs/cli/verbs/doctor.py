"""``dlfs doctor``: checks what DLFS depends on, on this machine and at its targets."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dlfs.base.units import format_count
from dlfs.cli.exits import ExitCode
from dlfs.cli.options import JsonOption
from dlfs.cli.output import Table, is_quiet, print_data, print_fields, print_json, print_text

if TYPE_CHECKING:
    from dlfs.diagnosis.finding import Finding

_STYLES = {"note": "cyan", "warning": "bold yellow", "error": "bold red"}


def doctor(
    targets: Annotated[list[str] | None, typer.Argument(metavar="[TARGET]...")] = None,
    skip: Annotated[list[str] | None, typer.Option(metavar="CHECK")] = None,
    json: JsonOption = False,
) -> None:
    """Check this machine, and targets and volumes that are named; say how to fix what is wrong.

    It changes nothing, needs no rights, and waits for nothing for long. Exit code 1 means that
    there are warnings or errors.

    Args:
        targets: Volumes, devices, services (unix:PATH), or storage nodes (ADDRESS or HOST:PORT).
        skip: Leave out the findings of a check, such as swap; repeatable.

    Examples:
        dlfs doctor
        dlfs doctor photos.img
        dlfs doctor 10.0.0.11 storage-b:8009 --skip fuse
    """
    from dlfs.diagnosis.doctor import examine, worst
    from dlfs.diagnosis.finding import Severity
    from dlfs.diagnosis.machine import Machine

    findings = list(examine(Machine(), targets or [], skip=skip or []))
    if json:
        rows = [asdict(each) | {"severity": each.severity.label} for each in findings]
        print_json({"findings": rows, "worst": worst(findings).label})
    else:
        _print(findings)
    if worst(findings) >= Severity.WARNING:
        raise typer.Exit(ExitCode.FAILURE)


def _print(findings: list[Finding]) -> None:
    """Print a table of what is well, and a paragraph for each other finding, the worst last."""
    from rich.text import Text

    well = [each for each in findings if not each.severity]
    if well and not is_quiet():
        rows = Table("check", "found", "read from", drop=("read from",))
        for each in well:
            rows.add_row(each.check, each.got, each.source)
        print_data(rows)
    for each in sorted(findings, key=lambda each: each.severity):
        if not each.severity:
            continue
        label = each.severity.label
        print()
        print_text(Text.assemble((label, _STYLES[label]), ": ", each.check))
        fields = {
            "found": each.got,
            "read from": each.source,
            "expected": each.expected,
            "because": each.why,
            "fix": each.fix,
        }
        print_fields(fields)
    counts = Counter(each.severity.label for each in findings)
    said = [format_count(counts[each], each) for each in ("error", "warning", "note")]
    print()
    print_text(f"{', '.join(said)}; {counts['ok']} as expected")
