"""Writes ``--help`` of ``dlfs`` and of each verb: description, arguments, options, examples.

The layout fits terminals of 52 columns and more. It depends neither on the version of typer nor on
rich, which takes longer to load than the rest of ``dlfs --help``.

All that the help of a verb says is in the docstring of its function: the sections ``Args`` and
``Examples`` follow the description. Options that several verbs share are described where they are
declared.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

WIDTH_MAX = 100
"""Largest width of the help, in characters."""
TERM_COLUMNS_MAX = 28
"""Largest width of a term, in characters; a longer one has a line above its description."""

Rows = list[tuple[str, str]]


def read_docstring(text: str) -> tuple[str, dict[str, str], str]:
    """Split the docstring of a verb.

    Returns:
        The description; that of each parameter, by its name; the examples, one a line.
    """
    text, _, examples = text.partition("\n\nExamples:\n")
    description, _, listed = text.partition("\n\nArgs:\n")
    _, *found = re.split(r"^    (\w+): ", listed, flags=re.MULTILINE)
    pairs = zip(found[::2], found[1::2], strict=True)
    helps = {name: " ".join(words.split()) for name, words in pairs}
    return description, helps, textwrap.dedent(examples)


def write_usage(command: Any, ctx: Any, formatter: Any) -> None:
    """Write the usage line and the description of a command."""
    pieces = ["[OPTIONS]" if ctx.parent else "[--quiet | --verbose]"]
    pieces += [_shown(argument) for argument in _parameters(command, "argument")]
    if hasattr(command, "commands"):
        pieces.append("VERB ...")
    formatter.write_usage(ctx.command_path, " ".join(pieces))
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(paragraph.replace("\n", " "))


def write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    """Write the arguments and options of a command."""
    arguments = [(_shown(each), _description(each)) for each in _parameters(command, "argument")]
    write_rows(formatter, "Arguments", arguments)
    options = [(_declaration(each), _description(each)) for each in _parameters(command, "option")]
    options.append((", ".join(ctx.help_option_names), "Show this message and exit."))
    write_rows(formatter, "Options", options)


def write_verbs(command: Any, formatter: Any) -> None:
    """Write the verbs of a group, by the panels that they are registered in."""
    panels: dict[str, Rows] = {}
    for name, verb in command.commands.items():
        summary = inspect.cleandoc(verb.help or "").split("\n\n")[0].replace("\n", " ")
        panels.setdefault(verb.rich_help_panel or "Verbs", []).append((name, summary))
    for panel, rows in panels.items():
        write_rows(formatter, panel, rows)


def write_examples(formatter: Any, examples: str) -> None:
    """Write commands as a user types them, one a line."""
    with formatter.section("Examples"):
        formatter.write(textwrap.indent(examples, " " * formatter.current_indent) + "\n")


def write_rows(formatter: Any, title: str, rows: Rows) -> None:
    """Write a section of terms and their descriptions."""
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows, col_max=TERM_COLUMNS_MAX)


# ---- parameters ----------------------------------------------------------------------------------


def _parameters(command: Any, kind: str) -> list[Any]:
    return [
        each
        for each in command.params
        if each.param_type_name == kind and not getattr(each, "hidden", False)
    ]


def _shown(argument: Any) -> str:
    """Return an argument as in the usage line: ``[DATASET]``."""
    name: str = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _declaration(option: Any) -> str:
    """Return an option with its value: ``-s, --size SIZE``."""
    names = ", ".join(sorted(option.opts, key=len) + option.secondary_opts)
    if option.is_flag:
        return names
    return f"{names} {option.metavar or option.name.upper()}"


def _description(parameter: Any) -> str:
    """Return the description of a parameter, with its default."""
    extra = []
    default = parameter.default
    if isinstance(default, str | int | float) and not isinstance(default, bool) and default != "":
        extra.append(f"default: {default}")
    if parameter.required and parameter.param_type_name == "option":
        extra.append("required")
    return " ".join([parameter.help or "", *(f"[{each}]" for each in extra)])
