import os
import pickle
import subprocess
import sys
from collections.abc import Callable

from dlfs.forks import OwnerProcess


def in_child(check: Callable[[], bool]) -> bool:
    """Return the result of a check that runs in a forked child."""
    child = os.fork()
    if child == 0:
        result = 2
        try:
            result = 0 if check() else 1
        finally:
            os._exit(result)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 1)
    return os.waitstatus_to_exitcode(status) == 0


def test_an_object_knows_the_process_that_made_it() -> None:
    owner = OwnerProcess()
    assert owner.is_current()
    assert owner.pid == os.getpid()
    assert not in_child(owner.is_current)
    assert in_child(lambda: OwnerProcess().is_current())
    assert owner.is_current()


def test_a_grandchild_is_neither_child_nor_parent() -> None:
    owner = OwnerProcess()

    def child() -> bool:
        of_child = OwnerProcess()
        return in_child(lambda: not owner.is_current() and not of_child.is_current())

    assert in_child(child)


def test_fork_hooks_that_run_earlier_see_the_new_process() -> None:
    """A hook registered before dlfs is loaded runs in a child before the forks are counted."""
    script = (
        "import os\nseen = []\n"
        "os.register_at_fork(after_in_child=lambda: seen.append(owner.is_current()))\n"
        "from dlfs.forks import OwnerProcess\nowner = OwnerProcess()\n"
        "child = os.fork()\n"
        "if child == 0:\n    os._exit(seen != [False])\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_an_unpickled_owner_is_the_process_that_unpickles() -> None:
    owner = OwnerProcess()
    pickled = pickle.dumps(owner)
    assert in_child(lambda: pickle.loads(pickled).is_current() and not owner.is_current())
