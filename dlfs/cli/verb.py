"""Shared parts of all verbs: the layout of --help, -q, -v, and VOLUME's default."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from dlfs.cli import help as layout
from dlfs.cli.environment import complete_arguments
from dlfs.cli.options import GIVEN
from dlfs.cli.output import Verbosity, set_verbosity
from dlfs.errors import UsageError

QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print errors only, no notes and no progress.")
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Report on stderr what is opened, and how.")
]


def with_verbosity(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of all verbs to the parameters of one.

    Raises:
        UsageError: the command line has both -q and -v.
    """

    @functools.wraps(function)
    def call(*, quiet: bool, verbose: bool, **named: Any) -> None:
        if quiet and verbose:
            raise UsageError("read the command line: expected -q or -v, got both")
        if quiet or verbose:
            set_verbosity(Verbosity.QUIET if quiet else Verbosity.VERBOSE)
        function(**named)

    signature = inspect.signature(function, eval_str=True)
    common = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=False)
        for name, kind in (("quiet", QuietOption), ("verbose", VerboseOption))
    ]
    parameters = [*signature.parameters.values(), *common]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def make_group(about: str) -> typer.Typer:
    """Return a group without verbs, with its description."""
    return typer.Typer(cls=VerbGroup, help=about, rich_markup_mode=None)


def add_verb(
    app: typer.Typer,
    name: str,
    verb: Callable[..., None] | typer.Typer,
    *,
    panel: str | None = None,
) -> None:
    """Register a verb, with the options of all verbs, or a group."""
    if isinstance(verb, typer.Typer):
        app.add_typer(verb, name=name, rich_help_panel=panel)
    else:
        app.command(name, cls=Verb, rich_help_panel=panel)(with_verbosity(verb))


def make_parser(name: str, verb: Callable[..., None] | typer.Typer, *, panel: str) -> Any:
    """Return the parser of a verb or a group that ``dlfs`` itself has."""
    app = typer.Typer(callback=lambda: None, add_completion=False, rich_markup_mode=None)
    add_verb(app, name, verb, panel=panel)
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    return commands[name]


class Verb(TyperCommand):
    """A verb: its --help from the docstring of its function, and VOLUME from the environment."""

    def __init__(self, name: str | None, **named: Any) -> None:
        super().__init__(name, **named)
        self.help, helps, self.examples = layout.read_docstring(self.help or "")
        parameters: list[Any] = self.params
        for each in parameters:
            each.help = helps.get(each.name, each.help)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; the environment may give VOLUME."""
        if not ctx.resilient_parsing:
            given, *_ = self.make_parser(ctx).parse_args(list(args))
            ctx.meta[GIVEN] = given
            if not ("help" in given or given.get("formats")):
                args = complete_arguments(self, ctx, args, given)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write --help."""
        layout.write_usage(self, ctx, formatter)
        layout.write_parameters(self, ctx, formatter)
        layout.write_examples(formatter, self.examples)


class VerbGroup(TyperGroup):
    """A group of verbs."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write --help."""
        layout.write_usage(self, ctx, formatter)
        layout.write_parameters(self, ctx, formatter)
        layout.write_verbs(self, formatter)
