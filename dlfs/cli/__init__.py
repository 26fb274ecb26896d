"""The command line: ``dlfs VERB ...``, one file a verb: each parses, calls the public API, prints.

Data goes to stdout; progress, notes, questions and errors go to stderr. An error is one line and an
exit code of ``dlfs.cli.exits``; ``--debug`` adds the traceback. What is no error that DLFS or the
system raises on purpose is a bug, and shows itself as Python shows bugs.

Nothing heavy is imported before a verb runs: ``dlfs`` loads what needs numpy or libdlfs when it is
first used, and rich is loaded to draw.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dlfs.cli import (
    cat,
    demo,
    discover,
    export,
    format,  # noqa: A004
    import_,
    incoming,
    info,
    ls,
    mount,
    repair,
    rm,
    seal,
    serve,
    stall,
    stat,
    target,
    top,
    umount,
    uri,
    verify,
    version,
)
from dlfs.cli.exits import EXITS, ExitCode, exit_code_of
from dlfs.cli.output import stderr_console
from dlfs.errors import DlfsError

# Its home moved when typer took click in: what the parser raises for a wrong command line.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]


def _report(message: str) -> None:
    """One line on stderr."""
    line = " ".join(message.split("\n"))
    console = stderr_console()
    console.print("[bold red]dlfs:[/] ", end="")
    console.print(line, markup=False, soft_wrap=True)


def _report_command_line(error: Exception) -> None:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "dlfs"
    message = getattr(error, "format_message", error.__str__)().rstrip(".")
    _report(f"{message}; see '{command} --help'")


def _discard_stdout() -> None:
    """Keep the interpreter from flushing into a pipe that nobody reads."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


class Commands(TyperGroup):
    """The verbs, with errors turned into a line and an exit code."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run a verb."""
        if isinstance(sys.stdout, io.TextIOWrapper):  # names are bytes, and marks are not ASCII
            utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
            sys.stdout.reconfigure(errors="surrogateescape" if utf8 else "backslashreplace")
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError as error:
            _discard_stdout()
            raise typer.Exit(ExitCode.PIPE) from error
        except SystemExit as error:
            if isinstance(error.__context__, BrokenPipeError):  # rich turns one into the other
                raise typer.Exit(ExitCode.PIPE) from error
            raise
        except KeyboardInterrupt as error:
            _report("interrupted")
            raise typer.Exit(ExitCode.INTERRUPTED) from error
        except (DlfsError, OSError) as error:
            if ctx.params.get("debug"):
                traceback.print_exception(error)
            _report("; ".join([str(error), *getattr(error, "__notes__", ())]))
            raise typer.Exit(exit_code_of(error)) from error
        return result

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> Any:
        """Parse, run and exit."""
        extra["standalone_mode"] = False
        try:
            code = super().main(args=args, prog_name=prog_name or "dlfs", **extra)
        except _CommandLineError as error:
            _report_command_line(error)
            code = ExitCode.USAGE
        except typer.Abort:
            _report("interrupted")
            code = ExitCode.INTERRUPTED
        sys.exit(int(code or 0))


def _epilog() -> str:
    rows = "\n".join(f"  {row.code:>3}  {row.meaning}" for row in EXITS)
    return f"Exit codes:\n\n{rows}"


app = typer.Typer(
    name="dlfs",
    cls=Commands,
    help="Samples for deep-learning training, packed on devices and read at their speed.",
    epilog=_epilog(),
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def start(
    ctx: typer.Context,
    debug: Annotated[  # noqa: ARG001  (Commands.invoke reads it)
        bool, typer.Option("--debug", envvar="DLFS_DEBUG", help="Show tracebacks of errors.")
    ] = False,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of all verbs."""
    if show_version:
        version.version()
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(ExitCode.USAGE)


_PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Volumes": {
        "format": format.format_volume,
        "info": info.info,
        "verify": verify.verify,
        "repair": repair.repair,
    },
    "Datasets": {
        "import": import_.import_dataset,
        "ls": ls.ls,
        "stat": stat.stat,
        "cat": cat.cat,
        "export": export.export,
        "rm": rm.rm,
    },
    "Mounting": {
        "mount": mount.mount,
        "umount": umount.umount,
        "seal": seal.seal,
        "incoming": incoming.incoming,
    },
    "Watching": {
        "top": top.top,
        "stall": stall.stall,
    },
    "Serving": {
        "serve": serve.serve,
    },
    "Storage nodes": {
        "discover": discover.discover,
    },
    "Help": {
        "demo": demo.demo,
        "uri": uri.uri,
        "version": version.version,
    },
}
for _panel, _verbs in _PANELS.items():
    for _name, _verb in _verbs.items():
        app.command(_name, rich_help_panel=_panel)(_verb)
app.add_typer(target.app, name="target", rich_help_panel="Storage nodes")


def main() -> None:
    """Run the command line, and exit."""
    app()
