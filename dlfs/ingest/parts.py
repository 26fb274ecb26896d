"""Opens parts of sources, which other processes have divided (``Source.divide``).

A coordinator of an import divides its source and sends the description of each part to a worker,
which opens it here. The part is a source like others: its blocks come in the order of the whole
source, its cursors are positions in it, and files and objects that are not those of the listing are
errors. Nothing is listed again.

===============================  ===================================================================
source                           part
===============================  ===================================================================
files of folders and lists       a range of the order of packing (``files.DescribedFiles``)
objects that are samples         the same (``remote.objects.DescribedObjects``)
several files of a format that   a run of files in the order in which they are read
is read file by file             (``file_parts.FormatPart``)
several objects of such files    the same (``remote.source.DescribedShards``)
plain tar, ZIP and TFRecord      a range of the order of packing (``file_parts.IndexPart``)
===============================  ===================================================================

Other sources are not divided: ``Source.undivided`` says why.

Threads: as ``Source``.
"""

from __future__ import annotations

import msgspec

from dlfs.base.arguments import check_integer
from dlfs.base.closing import closed_on_error
from dlfs.format.constants import ADDRESS_MAX
from dlfs.ingest.attributes import AttributedSource, read_rules
from dlfs.ingest.bad_records import BadRecords, SkipBad, opening
from dlfs.ingest.descriptions import (
    AttributedPart,
    FilesPart,
    FormatFilesPart,
    IndexedPart,
    ObjectFilesPart,
    ObjectsPart,
    malformed,
)
from dlfs.ingest.file_parts import FormatPart, IndexPart
from dlfs.ingest.files import DescribedFiles
from dlfs.ingest.remote.described import read_objects
from dlfs.ingest.remote.objects import DescribedObjects
from dlfs.ingest.remote.source import DescribedShards, SpooledPart
from dlfs.ingest.remote.spool import Spool
from dlfs.ingest.source import Source

PART_SPOOL_BYTES = 1 << 30
"""Most bytes of local copies of the objects of a part, unless the caller says otherwise."""

SourcePart = FilesPart | ObjectsPart | FormatFilesPart | IndexedPart | ObjectFilesPart
Part = SourcePart | AttributedPart

_decoder: msgspec.msgpack.Decoder[Part] = msgspec.msgpack.Decoder(Part)


def open_part(
    description: bytes,
    *,
    spool: str | None = None,
    spool_bytes: int | None = None,
    skip_bad: int | str | None = None,
) -> Source:
    """Open a part of a source.

    Args:
        description: from ``Division.describe``, of this process or another one.
        spool: directory for local copies of objects, as for ``open_source``; closing the source
            deletes them. A process that reads the part again meanwhile needs another directory.
        spool_bytes: most bytes of these copies, > 0; by default ``PART_SPOOL_BYTES``. A larger
            object, or a block of small ones, is the only one.
        skip_bad: bad records that may be left out, as for ``open_source``. A share counts for the
            part alone; so a caller that reads one part of several allows ``100%``, and compares the
            bad records of all parts itself.

    Raises:
        FormatError: the description is none.
        DlfsError: as ``open_source``.
    """
    if spool_bytes is not None:
        check_integer(spool_bytes, 1, ADDRESS_MAX, option="spool_bytes", action="open a part")
    limit_bytes = spool_bytes or PART_SPOOL_BYTES
    part = _decode(description)
    with opening(BadRecords(None if skip_bad is None else SkipBad.parse(skip_bad))):
        if not isinstance(part, AttributedPart):
            return _open(part, description, spool, limit_bytes)
        inner = _decode(part.part)
        if isinstance(inner, AttributedPart):
            raise malformed("expected one list of rules")
        source = _open(inner, description, spool, limit_bytes)
        with closed_on_error(source):
            return AttributedSource(source, read_rules(part.rules))


def _decode(description: bytes) -> Part:
    try:
        return _decoder.decode(description)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise malformed(f"expected its fields: {error}") from error


def _open(part: SourcePart, description: bytes, spool: str | None, limit_bytes: int) -> Source:
    if isinstance(part, FilesPart):
        return DescribedFiles(part)
    if isinstance(part, FormatFilesPart):
        return FormatPart(part)
    if isinstance(part, IndexedPart):
        return IndexPart(part)
    urls, items = read_objects(part.sources, part.objects)
    has_files = isinstance(part, ObjectFilesPart)
    copies = Spool(urls, spool, description)
    try:
        with copies.named():
            copies.take(urls, items, has_files=has_files)
            if isinstance(part, ObjectsPart):
                return SpooledPart(DescribedObjects(part, copies, limit_bytes), copies)
            copies.prepare(limit_bytes)
            return SpooledPart(DescribedShards(part, copies, limit_bytes), copies)
    except BaseException:
        copies.discard()
        raise
