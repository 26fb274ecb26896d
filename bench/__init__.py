"""Benchmarks: DLFS next to plain files, other formats and the limits of the machine; see README.md.

Every benchmark is a command: ``python -m bench`` (the cases), ``bench.peers``, ``bench.dlio``,
``bench.shuffle`` and ``bench.profile``. They share one framework:

    command      shared options; a `Session` runs the measurements and writes the report
    report       tables, the page of Markdown, the JSON file
    rounds       contenders run in turn, round after round
    comparison   ratios within rounds, floors and verdicts
    progress     the progress line and the time limit
    process      programs and child processes, and their end after a signal
    resources    CPU time and memory of processes
    serving      node services and mounts that are measured
    machine      facts of the machine, its caches, programs in C (``native/``)
    datasets     samples, plain files and volumes; on a namespace: targets
    measurement  one run of a contender of the cases (``contenders/``)

``gather`` runs all benchmarks as programs and writes an index: ``python -m bench report``.
"""
