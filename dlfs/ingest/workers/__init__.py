"""Imports by several workers, which read parts of a source and write data; one coordinator commits.

``by_workers`` divides the source and runs the coordinator, for ``ingest.importer``. ``coordinator``
and ``worker`` decide what each side does: state machines without I/O, which a simulator can run.
``serving`` is the coordinator's loop over sockets, processes and the volume; ``process`` is the
program of a worker, whose connection ``link`` serves in a thread. ``messages`` are what they say to
each other, and ``import_setup`` what a worker needs to know; ``connection`` sends frames of them.
``listening`` admits workers by an ``invitation``; ``launching`` starts them as processes.

What workers may write, and until when, is the matter of ``dataset.parts_writer``, ``store.grants``
and ``block`` (docs/leases.md).
"""
