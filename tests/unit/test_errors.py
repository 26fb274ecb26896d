"""The tree of errors: every class, its bases, its place in the picture."""

import errno
import inspect

import pytest

import dlfs
from dlfs import errors
from dlfs.errors import DlfsError


def all_errors() -> list[type[DlfsError]]:
    """Every class of the tree, the root included."""
    found, waiting = [], [DlfsError]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting.extend(kind.__subclasses__())
    return [kind for kind in found if kind.__module__ == "dlfs.errors"]


@pytest.mark.parametrize("kind", all_errors())
def test_every_error_carries_its_message_and_is_public(kind: type[DlfsError]) -> None:
    error = kind("read sample 3: expected 1, got 2")
    assert str(error) == "read sample 3: expected 1, got 2"
    assert isinstance(error, DlfsError)
    assert kind.__doc__
    assert getattr(dlfs, kind.__name__) is kind
    assert kind.__name__ in dlfs.__all__
    assert kind.__name__ in (errors.__doc__ or "")


def test_the_tree_is_all_there_is() -> None:
    classes = {kind for _, kind in inspect.getmembers(errors, inspect.isclass)}
    assert classes == set(all_errors())


def test_only_what_may_pass_is_retryable() -> None:
    retryable = {kind for kind in all_errors() if kind.retryable}
    assert retryable == {
        errors.DeviceLostError,
        errors.DeviceTimeoutError,
        errors.LockedError,
        errors.ServiceLostError,
    }


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (errors.UsageError, ValueError),
        (errors.NotFoundError, LookupError),
        (errors.ExistsError, FileExistsError),
        (errors.LockedError, BlockingIOError),
        (errors.SpaceError, OSError),
        (errors.DeviceError, OSError),
    ],
)
def test_second_bases(kind: type[DlfsError], base: type[Exception]) -> None:
    assert issubclass(kind, base)


def test_errno_of_the_world() -> None:
    assert errors.DeviceError("x").errno == errno.EIO
    assert errors.DeviceError("x", errno.ENODEV).errno == errno.ENODEV
    assert errors.SpaceError("x").errno == errno.ENOSPC


@pytest.mark.timeout(10)
def test_tracebacks_of_errors_that_cause_each_other_are_dropped() -> None:
    first, second = DlfsError("first"), DlfsError("second")
    for error, cause in ((first, second), (second, first)):
        with pytest.raises(DlfsError):
            raise error from cause
    errors.drop_tracebacks(first)
    assert first.__traceback__ is None
    assert second.__traceback__ is None
