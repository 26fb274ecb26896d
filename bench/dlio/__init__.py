"""DLIO side by side: one training load on a local file system, the mount, and the sample API.

DLIO emulates training: its data loader reads, a sleep stands for the accelerator, and the share of
time that the accelerator was busy is its figure. It runs as it comes from PyPI, from a virtual
environment of its own (``make bench-dlio``), started by ``mpirun``. Each workload runs three ways:

- ``ext4``: DLIO's own reader on files of the file system of ``--dir``, whatever that is;
- ``mount``: the same reader on the same files through ``dlfs serve --mount``;
- ``plugin``: a data loader class of ours (``plugin.py``), named to DLIO by its option
  ``data_loader_classname``, on batches of the same service's sample API.

DLIO makes the data itself, once on the disk and once through the write-once mount, which is then
sealed; both are compared byte by byte. TFRecord files are also imported as records, for ``plugin``:
there a sample is a record, and every epoch a random permutation of all of them.

``workloads.py`` is the table of workloads, ``feed.py`` reads and decodes, ``stage.py`` lays data
out, ``run.py`` is one run in a process of its own, ``report.py`` the tables.
"""
