"""The command line: ``dlfs VERB ...``, or ``python -m dlfs.cli VERB ...``.

``main`` comes before everything else, so that Ctrl-C while Python still imports the verbs
(``dlfs.cli.commands``) ends in one line, too.
"""

from dlfs.cli.interrupts import end, end_on_interrupt


def main() -> None:
    """Run the command line, and exit."""
    end_on_interrupt()
    try:
        from dlfs.cli.commands import app

        app()
    except KeyboardInterrupt:
        end()
