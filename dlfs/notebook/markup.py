"""Builds HTML in which every text is escaped, whatever it contains.

``Html`` marks what is HTML already. ``element`` escapes all other strings, so that names, paths and
attributes from media cannot become tags. ``page`` also turns off the formulas of MathJax, which a
notebook would otherwise look for in them.

Limits: constants below, in characters and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

import numpy as np

from dlfs.base.units import format_bytes

CELL_CHARACTERS_MAX = 60
"""Most characters of a value in a table."""
TITLE_CHARACTERS_MAX = 400
"""Most characters of a title or an error."""
PAGE_BYTES_MAX = 200 << 10
"""Most bytes of a page."""

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "rgba(128,128,128,.25)"
"""Colours of bars, readable on light and dark backgrounds, and for the colour-blind."""


class Html(str):
    """A string that is HTML already."""

    __slots__ = ()


def readable(value: object, characters: int = CELL_CHARACTERS_MAX) -> str:
    """Return a value as one line of printable text, cut if it is long."""
    if isinstance(value, float | np.floating):
        text = f"{value:.6g}"
    elif isinstance(value, bytes):
        text = value[: 4 * characters + 4].decode("utf-8", "backslashreplace")
    else:
        text = (value if isinstance(value, str) else str(value))[: characters + 1]
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= characters else text[: characters - 1] + "…"


def _escape(text: str) -> str:
    """Return a text as HTML that can be encoded, with lone surrogates as escapes."""
    return escape(text.encode("utf-8", "backslashreplace").decode())


def fragment(*children: str) -> Html:
    """Join HTML and texts; texts are escaped."""
    return Html("".join(c if isinstance(c, Html) else _escape(c) for c in children))


def element(tag: str, *children: str, style: str = "", **attributes: str) -> Html:
    """Return an element.

    Args:
        tag: name of the element.
        children: its content; a string that is not ``Html`` is escaped.
        style: its style.
        attributes: other attributes by name; their values are escaped.
    """
    values = {**({"style": style} if style else {}), **attributes}
    shown = "".join(f' {name.replace("_", "-")}="{_escape(v)}"' for name, v in values.items())
    return Html(f"<{tag}{shown}>{fragment(*children)}</{tag}>")


def image(source: str, alt: str, style: str) -> Html:
    """Return an image; ``source`` is a data URI."""
    return Html(f'<img src="{_escape(source)}" alt="{_escape(alt)}" style="{_escape(style)}">')


def table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()
) -> Html:
    """Return a table.

    Args:
        titles: titles of the columns.
        rows: cells of each row.
        right: titles of the columns that are flush right, such as numbers.
    """
    flush_right = [title in set(right) for title in titles]

    def row(tag: str, cells: Sequence[str]) -> Html:
        made = (
            element(tag, cell, style=f"text-align:{'right' if is_right else 'left'}")
            for cell, is_right in zip(cells, flush_right, strict=True)
        )
        return element("tr", *made)

    head = element("thead", row("th", titles))
    body = element("tbody", *(row("td", cells) for cells in rows))
    return element("table", head, body, style="margin:.4em 0")


def bar(*parts: tuple[float, str, str]) -> Html:
    """Return a bar of coloured parts.

    Args:
        parts: of each part its share of the bar, 0..1, its colour, and a description.
    """
    made = [
        element("div", title=label, style=f"width:{100 * share:.1f}%;background:{colour}")
        for share, colour, label in parts
    ]
    return element(
        "div",
        *made,
        role="img",
        aria_label=", ".join(label for _, _, label in parts),
        style="display:flex;width:24em;max-width:100%;height:.8em;border-radius:.2em;"
        f"overflow:hidden;background:{GREY}",
    )


def line(*children: str) -> Html:
    """Return a line of text below a title."""
    return element("div", *children, style="margin:.2em 0")


def note(text: str) -> Html:
    """Return a line of less weight, such as the number of rows that are left out."""
    return element("div", text, style="opacity:.7;margin:.2em 0")


def problem(error: BaseException) -> Html:
    """Return an error, to show in place of what could not be made."""
    text = readable(f"{type(error).__name__}: {error}", TITLE_CHARACTERS_MAX)
    return element("div", text, style=f"border-left:.3em solid {ORANGE};padding-left:.5em")


def attempt(build: Callable[[], Html]) -> Html:
    """Return what a function makes, or its error as HTML."""
    try:
        return build()
    except Exception as error:  # noqa: BLE001  a notebook shows an object whatever its state
        return problem(error)


def page(title: Callable[[], str], *sections: Callable[[], Html]) -> str:
    """Return the HTML of an object. A section that raises shows its error instead.

    Args:
        title: returns the object's ``repr``.
        sections: return the parts below it.

    Returns:
        At most ``PAGE_BYTES_MAX`` bytes of UTF-8.
    """

    def heading() -> Html:
        text = readable(title().strip("<>"), TITLE_CHARACTERS_MAX)
        return element("div", text, style="font-weight:bold;margin-bottom:.3em")

    made = [*dict.fromkeys(map(attempt, (heading, *sections)))]  # the same error once
    # These classes tell MathJax, versions 2 and 3, to leave dollar signs alone.
    whole = element("div", *made, **{"class": "dlfs tex2jax_ignore mathjax_ignore"})
    size = len(whole.encode())
    if size > PAGE_BYTES_MAX:
        return element("div", made[0], note(f"not shown: {format_bytes(size)} of HTML"))
    return whole
