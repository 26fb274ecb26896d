"""HTML: every text is escaped, on one line, cut; a page never raises and never grows too large."""

from __future__ import annotations

import pytest

from dlfs.notebook.markup import (
    PAGE_BYTES_MAX,
    Html,
    bar,
    element,
    fragment,
    line,
    page,
    readable,
    table,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        (b"bytes", "bytes"),
        (b"not UTF-8: \xff", "not UTF-8: \\xff"),
        ("a\nb\tc\0", "a\\nb\\tc\\x00"),
        ("lone \udcff", "lone \\udcff"),
        ("turned \u202e round", "turned \\u202e round"),
        (7, "7"),
        (1 / 3, "0.333333"),
        ("x" * 61, "x" * 59 + "…"),
        (b"x" * 61, "x" * 59 + "…"),
        ("ä".encode() * 60, "ä" * 60),
    ],
)
def test_values_are_printable_and_cut(value, text):
    assert readable(value) == text


def test_long_values_are_cut_before_they_are_escaped():
    assert readable("\0" * (100 << 20)) == ("\\x00" * 15)[:59] + "…"


def test_texts_are_escaped_and_html_is_not():
    nasty = """<b a="1">'&"""
    escaped = "&lt;b a=&quot;1&quot;&gt;&#x27;&amp;"
    assert fragment(nasty) == escaped
    assert element("div", nasty, title=nasty) == f'<div title="{escaped}">{escaped}</div>'
    assert element("div", element("b", "x"), Html("<i>")) == "<div><b>x</b><i></div>"
    assert nasty not in table([nasty], [[nasty]])
    assert nasty not in bar((0.5, "red", nasty))
    fragment("\udcff").encode()


def test_a_section_that_raises_shows_its_error_once():
    def fail() -> Html:
        raise ValueError("<script>")

    def later() -> Html:
        return line("later")

    made = page(lambda: "<Thing 'a'>", fail, later, fail)
    assert made.count("ValueError: &lt;script&gt;") == 1
    assert "Thing &#x27;a&#x27;" in made
    assert "later" in made


def test_a_title_that_raises():
    def fail() -> str:
        raise RuntimeError("no name")

    assert "no name" in page(fail)


def test_interrupts_are_not_swallowed():
    def interrupted() -> Html:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        page(lambda: "", interrupted)


def test_a_page_that_would_be_too_large_says_so():
    made = page(lambda: "<Thing>", lambda: line("ä" * (PAGE_BYTES_MAX // 2)))
    assert len(made) < 500
    assert "Thing" in made
    assert "not shown: 200." in made


def test_formulas_of_names_are_left_alone():
    assert 'class="dlfs tex2jax_ignore mathjax_ignore"' in page(lambda: "$x$")
