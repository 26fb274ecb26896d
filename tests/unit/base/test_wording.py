"""What messages show of URLs that bring their own permission."""

from __future__ import annotations

import pytest

from dlfs.base.wording import redact


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://h/a/b.tar", "https://h/a/b.tar"),
        ("https://user:secret@h:8/a?sig=secret&x=1#secret", "https://***@h:8/a?***"),
        ("import http://secret@h/a: no", "import http://***@h/a: no"),
        ("url='https://h/a?X-Amz-Signature=secret'", "url='https://h/a?***"),
        ("https://u:sec'ret@h/", "https://***@h/"),
        (
            'got "ftp://u:secret@h/a?b" and HTTP://h?secret',
            'got "ftp://***@h/a?b" and HTTP://h?***',
        ),
        ("s3://bucket/part-?.tar", "s3://bucket/part-?.tar"),
        ("https://h/#secret", "https://h/#***"),
        ("a@b, c://d", "a@b, c://d"),
        ("import https://***@h/a?***: no", "import https://***@h/a?***: no"),
        ("https://h/x@y", "https://h/x@y"),
        ("abfss://box@a.dfs.core.windows.net/x", "abfss://box@a.dfs.core.windows.net/x"),
        ("ABFS://box:secret@a.net/x", "ABFS://***@a.net/x"),
        ("sftp://box@a.net/x", "sftp://***@a.net/x"),
    ],
)
def test_secrets_of_urls_are_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert "secret" not in redact(shown)
