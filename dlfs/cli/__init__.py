"""The command line: ``dlfs VERB ...``, or ``python -m dlfs.cli VERB ...``."""

from dlfs_command import main as main
