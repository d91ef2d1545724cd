"""The hierarchy of hvpipe's error classes."""

from __future__ import annotations

import inspect

import pytest

from hvpipe import errors

KINDS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", KINDS)
def test_one_except_clause_catches_them_all(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.HvpipeError)
    assert issubclass(kind, RuntimeError)


def test_a_build_mismatch_is_a_failure_to_initialise() -> None:
    assert issubclass(errors.BuildMismatchError, errors.InitError)
