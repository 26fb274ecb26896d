"""Assembles the verbs of ``dlfs``, and turns errors into messages and exit codes.

Data goes to stdout; progress, notes, questions and errors go to stderr. An error is one line and an
exit code of ``dlfs.cli.exits``; ``--debug`` adds the traceback. An exception that neither DLFS nor
the system raises on purpose is a bug; Python prints its traceback.

No module that is slow to load is imported before a verb runs: ``dlfs`` loads numpy and libdlfs on
first use, and drawing loads rich. Of the verbs, the one of the command line is loaded; ``--help``
and the shell's completion of a verb's name load all.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from dlfs.base.wording import redact
from dlfs.cli import help as layout
from dlfs.cli.environment import DEFAULTED, VARIABLES, VOLUME_VARIABLE
from dlfs.cli.exits import EXITS, ExitCode, exit_code_of
from dlfs.cli.interrupts import interruptible
from dlfs.cli.options import as_typed
from dlfs.cli.output import Verbosity, log_on_stderr, print_text, set_verbosity
from dlfs.cli.streams import OutputError, ReaderGoneError, discard_stdout
from dlfs.cli.verb import VerbGroup, make_parser, with_verbosity
from dlfs.errors import DlfsError

# The base class of the parser's errors; its module depends on the version of typer.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]


def _report(message: str) -> None:
    """Print an error on stderr as one line."""
    from rich.text import Text

    line = " ".join(message.splitlines())
    print_text(Text.assemble(("dlfs:", "bold red"), " ", line), stderr=True)


def _report_command_line(error: Exception) -> None:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "dlfs"
    message = getattr(error, "format_message", error.__str__)().rstrip(".")
    _report(f"{message}; see '{command} --help'")


def _end_stdout(code: int) -> int:
    """Flush stdout; return the exit code of the command, which an error of the flush changes."""
    try:
        sys.stdout.flush()
    except OutputError as error:
        code = _report_output(error)
    return code


def _report_output(error: OutputError) -> ExitCode:
    """Report that stdout cannot be written; a reader that has gone is not reported."""
    discard_stdout()
    if isinstance(error, ReaderGoneError):
        return ExitCode.PIPE
    _report("; ".join([f"write the output: {error.strerror}", *getattr(error, "__notes__", ())]))
    return exit_code_of(error)


_PANELS = {
    "Volumes": {
        "format": "format:format_volume",
        "info": "info:info",
        "verify": "verify:verify",
        "repair": "repair:repair",
        "grow": "resize:grow",
        "rebalance": "resize:rebalance",
        "shrink": "resize:shrink",
    },
    "Datasets": {
        "import": "import_:import_dataset",
        "import-worker": "import_worker:import_worker",
        "ls": "ls:ls",
        "stat": "stat:stat",
        "cat": "cat:cat",
        "export": "export:export",
        "cp": "cp:cp",
        "diff": "diff:diff",
        "du": "du:du",
        "mv": "mv:mv",
        "rm": "remove:rm",
        "prune": "remove:prune",
    },
    "Mounting": {
        "mount": "mount:mount",
        "umount": "umount:umount",
        "hold": "hold:hold",
        "seal": "seal:seal",
        "incoming": "incoming:incoming",
    },
    "Watching": {
        "top": "top:top",
        "stall": "stall:stall",
        "doctor": "doctor:doctor",
        "bench": "bench:bench",
    },
    "Serving": {
        "serve": "serve:serve",
        "attach": "attach:attach",
        "detach": "attach:detach",
        "publish": "attach:publish",
        "unpublish": "attach:unpublish",
        "stop": "stop:stop",
    },
    "Storage nodes": {
        "discover": "discover:discover",
        "target": "target:app",
        "key": "key:app",
        "compose": "compose:app",
    },
    "Help": {
        "uri": "uri:uri",
        "version": "version:version",
    },
}
"""The module in ``dlfs.cli.verbs`` and the function or group of each verb, by panels of --help."""
_HOMES = {name: (panel, home) for panel, verbs in _PANELS.items() for name, home in verbs.items()}


class _Verbs(Mapping[str, Any]):
    """The parser of each verb by its name, which is loaded and made when it is first used."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            panel, home = _HOMES[name]
            module, _, attribute = home.partition(":")
            verb = getattr(import_module(f"dlfs.cli.verbs.{module}"), attribute)
            self._made[name] = make_parser(name, verb, panel=panel)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_HOMES)

    def __len__(self) -> int:
        return len(_HOMES)


class Commands(VerbGroup):
    """The verbs; turns errors into a line and an exit code."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.commands = _Verbs()  # type: ignore[assignment]  # none is added

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write --help."""
        super().format_help(ctx, formatter)
        layout.write_rows(formatter, "Environment", list(VARIABLES))
        codes = [(f"{row.code:>3}", row.meaning) for row in EXITS]
        layout.write_rows(formatter, "Exit codes", codes)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run a verb."""
        try:
            with interruptible(), log_on_stderr():
                return super().invoke(ctx)
        except OutputError:
            raise
        except KeyboardInterrupt as error:
            _report("; ".join(["interrupted", *getattr(error, "__notes__", ())]))
            raise typer.Exit(ExitCode.INTERRUPTED) from error
        except (DlfsError, OSError) as error:
            if ctx.params.get("debug"):
                traceback.print_exception(error)
            message = as_typed(str(error), ctx.invoked_subcommand)
            words = [redact(message), *getattr(error, "__notes__", ()), *_hints(ctx, error)]
            _report("; ".join(words))
            raise typer.Exit(exit_code_of(error)) from error

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> Any:
        """Parse, run and exit."""
        extra["standalone_mode"] = False
        set_verbosity(Verbosity.NORMAL)
        try:
            code = super().main(args=args, prog_name=prog_name or "dlfs", **extra) or ExitCode.OK
        except OutputError as error:
            sys.exit(_report_output(error))
        except SystemExit as error:
            if isinstance(error.__context__, OutputError):  # rich and typer turn one into the other
                sys.exit(_report_output(error.__context__))
            raise
        except _CommandLineError as error:
            _report_command_line(error)
            code = ExitCode.USAGE
        except typer.Abort:
            _report("interrupted")
            code = ExitCode.INTERRUPTED
        sys.exit(int(_end_stdout(code)))


def _hints(ctx: typer.Context, error: Exception) -> Iterator[str]:
    """Say where the volume came from, if it was not on the command line."""
    volume = ctx.meta.get(DEFAULTED)
    if volume is not None and exit_code_of(error) in (ExitCode.NOT_FOUND, ExitCode.USAGE):
        yield f"{VOLUME_VARIABLE} names the volume {volume}"


app = typer.Typer(
    name="dlfs",
    cls=Commands,
    help="Samples for deep-learning training, packed on devices and read at their speed.",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": layout.WIDTH_MAX,
    },
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
@with_verbosity
def start(
    ctx: typer.Context,
    debug: Annotated[  # noqa: ARG001  (Commands.invoke reads it)
        bool, typer.Option("--debug", envvar="DLFS_DEBUG", help="Show tracebacks of errors.")
    ] = False,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options of all verbs."""
    if show_version:
        from dlfs.cli.verbs.version import version

        version()
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(ExitCode.USAGE)
