"""DLIO side by side: one training load on a local file system, the mount, and the sample API.

DLIO emulates training: its data loader reads, and a sleep stands for the accelerator. It reports
the share of time that the accelerator was busy. It runs as it comes from PyPI, from a virtual
environment of its own (``make bench-dlio``), started by ``mpirun``. Each workload runs three ways:

- ``ext4``: DLIO's own reader on files of the file system of ``--dir``, whatever that is;
- ``mount``: the same reader on the same files through ``dlfs serve --mount``;
- ``plugin``: our data loader class (``plugin.py``), given by DLIO's option
  ``data_loader_classname``, on batches of the same service's sample API.

DLIO generates the data itself, once on the disk and once through the write-once mount, which is
sealed afterwards. Both are compared byte by byte. For ``plugin``, TFRecord files are also imported
as records: there a sample is a record, and every epoch a random permutation of all records.

``workloads.py`` is the table of workloads, ``feed.py`` reads and decodes, ``stage.py`` generates
the data, ``run.py`` is one run in a process of its own, ``report.py`` the tables.
"""
