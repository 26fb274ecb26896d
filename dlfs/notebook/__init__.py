"""Shows volumes, datasets, batches and epochs as HTML, as Jupyter does for the value of a cell.

Each class has a ``_repr_html_`` that calls its function here. ``markup`` builds HTML in which every
text is escaped, ``thumbnails`` makes small images of samples, and ``objects`` composes the pages.
This part knows the classes by protocols only, because they import it.

A page never raises: what cannot be read shows its error. It reads at most ``THUMBNAILS_MAX``
samples and a few megabytes of attributes, and it has at most 200 KiB.

Threads: any.
"""

from dlfs.notebook.markup import PAGE_BYTES_MAX
from dlfs.notebook.objects import show_batch, show_dataset, show_epoch, show_view, show_volume
from dlfs.notebook.thumbnails import THUMBNAILS_MAX

__all__ = [
    "PAGE_BYTES_MAX",
    "THUMBNAILS_MAX",
    "show_batch",
    "show_dataset",
    "show_epoch",
    "show_view",
    "show_volume",
]
