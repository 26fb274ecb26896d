"""Says what to do with a file that no format takes, such as a video, by its name.

A folder of such files is imported as files, and so is a file with ``--format folder``.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

_PAGE = "docs/formats.md, 'Other formats'"
_WRITER = f"read it with {{}} and add arrays by volume.writer, in five lines: {_PAGE}"

_KINDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("a NIfTI volume", _WRITER.format("nibabel"), ("*.nii", "*.nii.gz")),
    ("a DICOM file", _WRITER.format("pydicom"), ("*.dcm", "*.dicom", "*.ima")),
    (
        "a video",
        f"decode its frames and add them by volume.writer, in five lines: {_PAGE}",
        ("*.mp4", "*.mkv", "*.avi", "*.mov", "*.webm", "*.m4v", "*.mpg", "*.mpeg", "*.wmv"),
    ),
    (
        "a pickle, which can run any code and is not read",
        f"load it where you trust it, and add its values by volume.writer, in five lines: {_PAGE}",
        ("*.pkl", "*.pickle", "*.pt", "*.pth", "*.ckpt", "*.joblib"),
    ),
    (
        "JSON",
        "of a list of objects, jq -c '.[]' makes JSON Lines, which end in .jsonl; annotations of "
        "images as COCO's are given by --attributes",
        ("*.json", "*.json.gz"),
    ),
    ("an archive that is not read", "unpack it, and import the folder", ("*.rar", "*.7z")),
    ("a table that is not read", "write it as Parquet", ("*.orc", "*.avro", "*.xlsx", "*.lance")),
)
"""What a file is, what to do instead, and the patterns of its name, in lower case."""


def say_what_to_do(path: str) -> str | None:
    """Return what a file of no format is, and what to do with it; None if its name is unknown."""
    name = Path(path).name.lower()
    for kind, advice, patterns in _KINDS:
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return f"got {kind}: {advice}"
    return None
