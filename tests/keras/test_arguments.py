"""Arguments by name, whether a method takes them by name, by position, or in *args and **kwargs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from hvpipe.keras.arguments import by_name, keep_order, takes


def base(x: Any = None, y: Any = None, batch_size: Any = None, callbacks: Any = None) -> None:
    """Has the parameters of keras.Model.fit."""


def some(data: Any, epochs: int = 1, **more: Any) -> None: ...


def all_of_them(*args: Any, **kwargs: Any) -> None: ...


def the_rest(data: Any, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "named"),
    [
        (base, (1, None, 8), {"callbacks": 2}, {"x": 1, "y": None, "batch_size": 8, "callbacks": 2}),
        (some, (1,), {"verbose": 0}, {"data": 1, "verbose": 0}),
        (all_of_them, (1, None, 8), {"other": 2}, {"x": 1, "y": None, "batch_size": 8, "other": 2}),
        (all_of_them, (), {"x": 1}, {"x": 1}),
        (the_rest, (1, None, 8), {"callbacks": 2}, {"data": 1, "y": None, "batch_size": 8, "callbacks": 2}),
        (the_rest, (1,), {}, {"data": 1}),
    ],
)
def test_every_argument_has_a_name(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], named: dict[str, Any]
) -> None:
    assert by_name(method, args, kwargs, base) == named


@pytest.mark.parametrize(("method", "args"), [(some, ()), (base, (1,) * 5), (all_of_them, (1,) * 5)])
def test_too_few_and_too_many(method: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="argument"):
        by_name(method, args, {}, base)


def test_which_arguments_a_method_takes() -> None:
    assert takes(base, "callbacks")
    assert takes(some, "callbacks")
    assert not takes(base, "epochs")
    assert not takes(lambda *args: None, "callbacks")


class Batches(keras.utils.PyDataset):
    """A PyDataset of so many batches; None: without an end."""

    def __init__(self, batches: int | None) -> None:
        super().__init__()
        self.batches = batches

    @property
    def num_batches(self) -> int | None:
        return self.batches


@pytest.mark.parametrize(
    ("given", "shuffle"),
    [
        ({"x": tf.data.Dataset.range(2)}, False),
        ({"x": (i for i in range(2))}, False),
        ({"x": Batches(None)}, False),
        ({"x": type("MyLoader", (type("DataLoader", (), {}),), {})()}, False),
        ({"x": tf.data.Dataset.range(2), "shuffle": True}, True),  # Keras warns whom it helps
        ({"x": Batches(3)}, None),
        ({"x": [[1.0]]}, None),
        ({}, None),
    ],
)
def test_data_with_an_order_of_its_own_is_not_shuffled(given: dict[str, Any], shuffle: bool | None) -> None:
    without = dict(given)
    keep_order(base, without)  # which takes no `shuffle`
    assert without == given
    keep_order(keras.Model.fit, given)
    assert given.get("shuffle") is shuffle
