import ast
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dlfs
from dlfs.base.forks import Event, Lock, OwnerProcess, cached_property
from tests.support.forked import call_forked, run_forked

# Python 3.12 warns of any fork of a process with threads; here such a fork is under test.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

SECONDS = 10
"""Longest wait of a child for a lock, in seconds."""


def test_an_object_knows_the_process_that_made_it() -> None:
    owner = OwnerProcess()
    assert owner.is_current()
    assert owner.pid == os.getpid()
    assert not call_forked(owner.is_current)
    assert call_forked(lambda: OwnerProcess().is_current())
    assert owner.is_current()


def test_a_grandchild_is_neither_child_nor_parent() -> None:
    owner = OwnerProcess()

    def child() -> bool:
        of_child = OwnerProcess()
        return call_forked(lambda: not owner.is_current() and not of_child.is_current())

    assert call_forked(child)


def test_fork_hooks_that_run_earlier_see_the_new_process() -> None:
    """A hook registered before dlfs is loaded runs in a child before the forks are counted."""
    script = (
        "import os\nseen = []\n"
        "os.register_at_fork(after_in_child=lambda: seen.append(owner.is_current()))\n"
        "from dlfs.base.forks import OwnerProcess\nowner = OwnerProcess()\n"
        "child = os.fork()\n"
        "if child == 0:\n    os._exit(seen != [False])\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_an_unpickled_owner_is_the_process_that_unpickles() -> None:
    owner = OwnerProcess()
    pickled = pickle.dumps(owner)
    assert call_forked(lambda: pickle.loads(pickled).is_current() and not owner.is_current())


# ---- locks ---------------------------------------------------------------------------------------


@contextmanager
def in_other_thread(work: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Stop another thread where ``work`` calls its argument, and let it go on at the end."""
    there, go_on = threading.Event(), threading.Event()

    def stop() -> None:
        there.set()
        assert go_on.wait(60)

    thread = threading.Thread(target=work, args=[stop])
    thread.start()
    try:
        assert there.wait(60)
        yield
    finally:
        go_on.set()
        thread.join()


def hold(lock: Lock) -> Callable[[Callable[[], None]], None]:
    def work(stop: Callable[[], None]) -> None:
        with lock:
            stop()

    return work


def test_a_child_takes_a_lock_that_another_thread_held() -> None:
    lock = Lock()

    def take() -> None:
        for _ in range(2):
            assert lock.acquire(timeout=SECONDS)
            with lock:  # the same thread may take it again
                pass
            lock.release()

    with in_other_thread(hold(lock)):
        assert run_forked(take) == 0
        assert not lock.acquire(blocking=False)  # the parent's thread holds it still


def test_a_child_holds_what_the_thread_that_forked_held() -> None:
    lock = Lock()

    def go_on() -> None:
        taken: list[bool] = []
        other = threading.Thread(target=lambda: taken.append(lock.acquire(blocking=False)))
        other.start()
        other.join()
        assert taken == [False]
        lock.release()
        with pytest.raises(RuntimeError):
            lock.release()

    with lock:
        assert run_forked(go_on) == 0
    with pytest.raises(RuntimeError):
        lock.release()


def test_a_grandchild_takes_a_lock_that_a_thread_of_the_child_holds() -> None:
    lock = Lock()

    def child() -> None:
        with in_other_thread(hold(lock)):
            assert run_forked(lambda: lock.acquire(timeout=SECONDS) or os._exit(3)) == 0

    with in_other_thread(hold(lock)):
        assert run_forked(child) == 0


def test_a_lock_is_freed_with_its_last_reference() -> None:
    from dlfs.base.forks import _locks

    before = len(list(_locks))
    locks = [Lock() for _ in range(10)]
    assert len(list(_locks)) == before + 10
    del locks
    assert len(list(_locks)) == before


def test_a_child_sets_and_awaits_an_event_whose_lock_another_thread_held() -> None:
    event = Event()

    def use() -> None:
        assert not event.wait(0.0)
        event.set()
        assert event.is_set()
        assert event.wait()
        event.clear()
        thread = threading.Thread(target=event.set)
        thread.start()
        assert event.wait(SECONDS)
        thread.join()

    with in_other_thread(hold(event._cond._lock)):  # type: ignore[attr-defined]
        assert run_forked(use) == 0
    assert not event.is_set()


def test_an_event_wakes_all_that_wait_in_the_parent_and_not_in_a_child() -> None:
    event = Event()
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda: woken.append(event.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert run_forked(event.set) == 0
    assert not event.is_set()
    event.set()
    for thread in threads:
        thread.join()
    assert woken == [True] * 3


class Slow:
    """An object whose property stops the thread that computes it first."""

    stop: Callable[[], None] = staticmethod(lambda: None)

    @cached_property
    def value(self) -> object:
        """A new object."""
        stop, self.stop = self.stop, lambda: None
        stop()
        return object()


def test_a_child_computes_a_property_that_another_thread_was_computing() -> None:
    slow = Slow()

    def work(stop: Callable[[], None]) -> None:
        slow.stop = stop
        assert slow.value is slow.value

    def read() -> None:
        assert slow.value is slow.value
        assert Slow().value is not slow.value

    with in_other_thread(work):
        assert run_forked(read) == 0
    assert slow.value is slow.value
    assert Slow.value.__doc__ == "A new object."


# ---- no other locks ------------------------------------------------------------------------------

FORBIDDEN = {
    "threading": {"Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore"}
    | {"Barrier", "Timer"},
    "queue": {"Queue", "LifoQueue", "PriorityQueue", "SimpleQueue"},
    "multiprocessing": {"Lock", "RLock", "Condition", "Event", "Semaphore", "Queue"},
    "_thread": {"RLock", "allocate_lock"},
    "functools": {"cached_property"},
    "concurrent.futures": {"ThreadPoolExecutor", "ProcessPoolExecutor"},
    "dlfs.base.threads": {"ThreadPool"},
    "logging": {"Handler"},
}
"""What has a lock that no child renews, by module. The caches of functools have none: their code in
C runs under the interpreter's lock. ``threading.local`` has none either. Trio's locks belong to one
thread. Handlers of ``logging`` renew their locks themselves, and we have none of our own."""

ALLOWED = {
    ("base/forks.py", "RLock"): "the mechanism",
    ("base/forks.py", "Condition"): "the mechanism; its lock is a Lock",
    ("base/forks.py", "Event"): "base of ours, which puts such a Condition in it",
    ("mount/mountpoint.py", "SimpleQueue"): "ends with the call",
    ("base/threads.py", "ThreadPoolExecutor"): "base of ThreadPool, whose uses are listed",
    ("base/threads.py", "Condition"): "a child does not wait for the pool of its parent",
    ("diagnosis/bench.py", "ThreadPool"): "ends with the call",
    ("fabric/discovery.py", "ThreadPool"): "ends with the call",
    ("ingest/files.py", "ThreadPool"): "ends when all files are listed",
    ("ingest/source.py", "ThreadPool"): "ends with the call",
    ("ingest/formats/zip.py", "ThreadPool"): "ends with the call",
    ("ingest/remote/fetching.py", "ThreadPool"): "ends with the import",
    ("ingest/remote/fetching.py", "Condition"): "ends with the import; its lock is a Lock",
    ("ingest/workers/link.py", "Condition"): "ends with the worker; its lock is a Lock",
    ("store/locking.py", "ThreadPool"): "ends with the call",
    ("adapters/torch/samples.py", "ThreadPool"): "SampleDataset makes one in each process",
    ("adapters/torch/checkpoint/staging.py", "ThreadPool"): "made anew in each process",
    ("adapters/torch/checkpoint/reader.py", "ThreadPool"): "ends with the call",
    ("adapters/torch/checkpoint/pieces.py", "ThreadPool"): "ends with the call",
}
"""Why a child never meets one of these, by file and name."""


def made_in(path: Path) -> set[str]:
    """Return the forbidden names that a module uses other than in annotations."""
    tree = ast.parse(path.read_text())
    annotations = {
        id(part)
        for node in ast.walk(tree)
        for one in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if one is not None
        for part in ast.walk(one)
    }
    modules, names = {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                if alias.name in FORBIDDEN.get(str(node.module), ()):
                    names[alias.asname or alias.name] = alias.name
    found = set()
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        if isinstance(node, ast.Name) and node.id in names:
            found.add(names[node.id])
        elif isinstance(node, ast.Attribute):
            module = modules.get(ast.unparse(node.value), "")
            found |= {node.attr} & FORBIDDEN.get(module, set())
    return found


def test_all_locks_are_renewed_in_children() -> None:
    root = Path(dlfs.__file__).parent
    made = {
        (str(path.relative_to(root)), name) for path in root.rglob("*.py") for name in made_in(path)
    }
    assert made == set(ALLOWED)


@pytest.mark.parametrize(
    "text",
    [
        "import threading\nx = threading.Lock()",
        "import threading as t\nx = t.Lock",
        "from threading import Condition as C\nx = C()",
        "import queue\nx: queue.Queue[int] = queue.Queue()",
        "import concurrent.futures\nx = concurrent.futures.ThreadPoolExecutor(1)",
        "import functools\nclass X:\n    @functools.cached_property\n    def y(self): ...",
        "import logging\nclass X(logging.Handler): ...",
    ],
)
def test_other_locks_are_found(tmp_path: Path, text: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert len(made_in(path)) == 1


def test_annotations_are_no_locks(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("import queue\nx: queue.Queue[int]\ndef f(y: queue.Queue[int]) -> None: ...")
    assert made_in(path) == set()
