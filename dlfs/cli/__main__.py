"""``python -m dlfs.cli``: the command line without its script."""

from dlfs.cli import main

main()
