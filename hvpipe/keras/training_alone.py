"""Notices training that no rank averages: models without `data_parallel`, and optimizers without a hook.

Two public methods of Keras are replaced once there are several ranks, and still do what they did:

    keras.optimizers.Optimizer.apply     looks whether somebody has averaged the gradients of these variables
    keras.Model.make_train_function      lets the first step of a plain model say which model it belongs to

hvpipe's hooks replace `apply` on an optimizer instance, so their updates do not come here. What averages
gradients in another way (a tape, `average_gradients`, an allreduce in the script) notes so in the session.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import trained_variables
from hvpipe.keras.initial_state import checksum_of
from hvpipe.keras.ops import without_autograph
from hvpipe.keras.variables import identity, name_of
from hvpipe.log import logger
from hvpipe.session import Session, current, is_initialized

_SHARE = 0.5
"""Gradients count as averaged if the script itself has reduced such a share of their numbers.

Losses, metrics and statistics of the data are less; gradients of half types, or all in one array, are all.
"""
_MANY = 1 << 40  # numbers in a tensor whose shape is not known yet

_alone = contextvars.ContextVar("alone", default=False)
_SHOWN = 3


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Train on this rank alone, on purpose: a small model for a test, a baseline, steps between averages.

    Inside, hvpipe neither warns that no rank averages, nor ends the job under `strict`. Copies of a
    `data_parallel` model that are made inside are plain Keras models, which train on this rank only.

    Returns:
        A context manager, which also decorates functions.

    Raises:
        HvpipeError: Inside, if a `data_parallel` model trains or is evaluated: that needs all ranks.

    Example:
        ```python
        if hvpipe.rank() == 0:
            with hk.alone():
                probe = keras.models.clone_model(model)
                probe.compile("adam", "mse")
                probe.fit(x, y)
        ```
    """
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def is_alone() -> bool:
    """Return whether this code trains on its rank alone, on purpose."""
    return _alone.get()


def refuse_alone(model: Any, method: str) -> None:
    """Raise HvpipeError if a method that needs all ranks is called inside `alone`."""
    if is_alone():
        raise HvpipeError(
            f"{method} of a data_parallel model needs all ranks. Inside hk.alone() use a plain model, such "
            "as keras.models.clone_model(model) or copy.deepcopy(model), made inside it. "
            f"Received: {method} of model {model.name} inside hk.alone()"
        )


# --- What averages ----------------------------------------------------------------------------------------


def note_hooked(session: Session, optimizer: Any) -> None:
    """Note that hvpipe's hook in an optimizer averages. Optimizers inside it update with these averages."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    session.looked_at.update(
        each for each in (inner, *getattr(inner, "optimizers", ())) if each is not optimizer
    )


def note_averaged(session: Session, variables: Sequence[Any] = ()) -> None:
    """Note that ranks average the gradients of variables, or share them in another way that hvpipe knows."""
    session.averagings += 1
    session.averaged.update((identity(variable), session.averagings) for variable in variables)


def note_by_hand(tensors: Sequence[Any]) -> None:
    """Note that the script itself sums or averages tensors, which may be gradients."""
    current().reduced_by_hand += sum(map(_numbers, tensors))


def _numbers(value: Any) -> int:
    if isinstance(value, tf.IndexedSlices):
        return _MANY  # they stand for a whole table
    shape = tf.TensorShape(value.shape if hasattr(value, "shape") else np.shape(value))
    return shape.num_elements() if shape.is_fully_defined() else _MANY


def _by_script(session: Session, variables: Sequence[Any]) -> bool:
    """Return whether the script may have reduced the variables' gradients since the update before.

    What it has reduced for these does not suffice for others as well.
    """
    reduced, numbers = session.reduced_by_hand, sum(map(_numbers, variables))
    session.reduced_by_hand = max(0, reduced - numbers)
    return 0 < reduced >= _SHARE * numbers


def _of_nets(variables: Sequence[Any], model: Any = None) -> list[Any]:
    """Return the variables that belong to a model or another net: they have a path with a net's name.

    Others may be meant for this rank, such as the noise of an adversarial example.
    """
    mine = set() if model is None else set(map(identity, model.variables))
    return [v for v in variables if identity(v) in mine or "/" in getattr(v, "path", v.name)]


# --- A step -----------------------------------------------------------------------------------------------


class Step:
    """The training step of a model, while Python runs it or TensorFlow traces it.

    Args:
        session: The ranks.
        model: The model.
    """

    def __init__(self, session: Session, model: Any) -> None:
        self.session = session
        self.model = model
        self.found: list[str] = []
        """The updates that nobody averages, in words."""
        self.optimizers: list[Any] = []
        """The optimizers that make them."""
        self.alone = is_alone()
        """Whether the whole step trains alone on purpose. It is looked at for a later `fit` on all ranks."""
        self.on_purpose: list[Any] = []
        """Variables that it updates inside `alone`."""
        self.averages = False
        """Whether an update had averaged gradients."""
        self._averagings = session.averagings
        session.reduced_by_hand = 0  # what was reduced before is no gradient of this step

    def unaveraged(self, variables: Sequence[Any]) -> list[Any]:
        """Return the variables of nets among these whose gradients nobody has averaged in this step."""
        of_nets = _of_nets(variables, self.model)
        found = [v for v in of_nets if self.session.averaged.get(identity(v), 0) <= self._averagings]
        if found and _by_script(self.session, found):
            self.averages = True
            return []
        return found

    def end(self) -> None:
        """Note whether anything was averaged, also for updates without an optimizer of Keras."""
        if not self.averages:
            hooks = self.session.averagings > self._averagings
            trained = self.model.trainable_variables
            self.averages = hooks or (bool(trained) and _by_script(self.session, trained))


_step: contextvars.ContextVar[Step | None] = contextvars.ContextVar("step", default=None)


def _unaveraged_in_loop(session: Session, variables: Sequence[Any]) -> list[Any]:
    """Return the variables whose gradients nobody has averaged for this update, in a loop of the script."""
    found = [v for v in _of_nets(variables) if session.averaged.pop(identity(v), None) is None]
    return [] if found and _by_script(session, found) else found


@contextlib.contextmanager
def step_of(session: Session, model: Any) -> Iterator[Step]:
    """Collect the updates of a model's step that nobody averages; the caller reports them."""
    step = Step(session, model)
    token = _step.set(step)
    try:
        yield step
        step.end()
    finally:
        _step.reset(token)


class _Watched:
    """The train function of a plain model, until a step outside of `alone` has shown whether it averages."""

    def __init__(self, session: Session, model: Any, function: Callable[..., Any]) -> None:
        self._session = session
        self._model = weakref.ref(model)
        self._function = function
        self._found: list[str] = []  # a graph is traced once, perhaps inside `alone`
        self._optimizers: list[Any] = []
        self._averages = False

    def __call__(self, iterator: Any) -> Any:
        model = self._model()
        if model is None or _watching() is not self._session:
            return self._function(iterator)
        # Inside `alone` steps cost what Keras' own do.
        before = None if is_alone() else checksum_of(model.trainable_variables)
        with step_of(self._session, model) as step:
            logs = self._function(iterator)
        self._found += step.found
        self._optimizers += step.optimizers
        self._averages = self._averages or step.averages
        if before is not None:
            changed = checksum_of(model.trainable_variables) != before
            if self._found or (changed and not self._averages):
                self._tell(model)  # under strict, an error at every step
            self._session.looked_at.update(self._optimizers)  # a batch of another shape is traced again
            if model.train_function is self:
                model.train_function = self._function
        return logs

    def _tell(self, model: Any) -> None:
        if self._averages:
            tell_of_optimizers(self._session, model, self._found)
            return
        received = "; ".join(dict.fromkeys(self._found)) or "updates by its train_step"
        tell(
            self._session,
            f"model {_without_number(model.name)}",
            f"model {model.name} trains alone on this rank: nobody averages its gradients over the "
            f"{self._session.world.size} ranks, so their weights drift apart. Copies, loaded models and "
            "models around a data_parallel one have no hooks. Write `model = hk.data_parallel(model)` before "
            "fit; or, if this rank should train alone, train inside `with hk.alone():`. "
            f"Received: {received}",
        )


def tell_of_optimizers(session: Session, model: Any, found: Sequence[str]) -> None:
    """Report updates in a model's step that nobody averages, while other updates are averaged."""
    tell(
        session,
        f"step of model {_without_number(model.name)}",
        f"a part of model {model.name} trains alone on each rank: nobody averages its gradients over the "
        f"{session.world.size} ranks, so their weights drift apart. Write "
        "`optimizer = hk.DistributedOptimizer(optimizer)` for every optimizer of train_step except the one "
        "given to compile; or, if ranks should differ, update inside `with hk.alone():`. "
        f"Received: {'; '.join(dict.fromkeys(found))}",
    )


def tell_of_difference(session: Session, model: Any, received: str) -> None:
    """Report weights that differ between ranks after a step, although all ranks began alike."""
    tell(
        session,
        f"step of model {_without_number(model.name)}",
        f"weights of model {model.name} differ between ranks after a step: a part of it trains alone on each "
        "rank. Write `optimizer = hk.DistributedOptimizer(optimizer)` for every optimizer of train_step "
        "except the one given to compile; average what train_step itself assigns; restore weights that "
        "it changes for a moment from a copy, since adding and subtracting rounds; or, if ranks should "
        "differ, let an optimizer update inside `with hk.alone():`. "
        f"Received: {received}",
    )


def tell(session: Session, what: str, text: str) -> None:
    """Report training that no rank averages, once: raise HvpipeError if the session is strict, else warn.

    Rank 0 warns at once. What rank 0 does not do, another rank tells when the session ends, so that one rank
    tells what many do.

    Args:
        session: The ranks.
        what: The same on all ranks that do the same.
        text: What was found, and the line to write.
    """
    if session.settings.strict:
        raise HvpipeError(text)
    told = what in session.trained_alone
    session.trained_alone[what] = text
    if session.world.rank == 0 and not told:
        logger.warning("hvpipe: %s", text)


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


# --- Keras' methods ---------------------------------------------------------------------------------------


def _watching() -> Session | None:
    """Return the session if it has several ranks, and this process is one of them."""
    if not is_initialized():
        return None
    session = current()
    return session if session.world.size > 1 and not session.is_parents else None


def _look(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None) -> None:
    """Look at an update that no hook of hvpipe has made."""
    session, step = _watching(), _step.get()
    if session is None or "apply" in vars(optimizer):
        return
    if optimizer in session.looked_at:
        if step is None:
            session.reduced_by_hand = 0  # for this update, or for the one before
        return
    trained = trained_variables(optimizer) if variables is None else variables
    if is_alone() and not (step is not None and step.alone):
        if step is not None:
            step.on_purpose += trained
        return
    pairs = [(g, v) for g, v in zip(gradients, trained, strict=False) if g is not None]
    changed = [v for _, v in pairs]
    if _all_zero([g for g, _ in pairs]):
        return  # it only lets the optimizer make its variables
    found = _unaveraged_in_loop(session, changed) if step is None else step.unaveraged(changed)
    if step is None:
        session.looked_at.add(optimizer)  # one look is for all its updates in loops of the script
    if not found:
        return
    listed = ", ".join(map(name_of, found[:_SHOWN])) + (
        f" and {len(found) - _SHOWN} more" if found[_SHOWN:] else ""
    )
    update = f"an update of {listed} by optimizer {optimizer.name}"
    if step is not None:
        step.found.append(update)
        step.optimizers.append(optimizer)
        return
    tell(
        session,
        f"optimizer {_without_number(optimizer.name)} of {name_of(found[0])}",
        f"optimizer {optimizer.name} trains alone on this rank: nobody has averaged its gradients over the "
        f"{session.world.size} ranks, so their weights drift apart. Write "
        "`optimizer = hk.DistributedOptimizer(optimizer)`, or average the gradients with "
        "hk.DistributedGradientTape; or, if this rank should train alone, update inside `with hk.alone():`. "
        f"Received: {update}",
    )


def _all_zero(gradients: Sequence[Any]) -> bool:
    if not tf.executing_eagerly():
        return False
    values = (g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients)
    return not any(np.any(keras.ops.convert_to_numpy(value)) for value in values)


@functools.cache
def _replace_methods() -> None:
    own_apply = keras.optimizers.Optimizer.apply
    own_make = keras.Model.make_train_function

    @functools.wraps(own_apply)
    @without_autograph
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = None if trainable_variables is None else list(trainable_variables)
        _look(self, grads, variables)
        return own_apply(self, grads, variables)

    @functools.wraps(own_make)
    def make_train_function(self: Any, force: bool = False) -> Any:
        before = self.train_function
        made = own_make(self, force)
        session = _watching()
        if session is None or "_hvpipe" in vars(self) or self.train_function is before:
            return made
        self.train_function = _Watched(session, self, self.train_function)
        return self.train_function

    keras.optimizers.Optimizer.apply = apply
    keras.Model.make_train_function = make_train_function


def watch(session: Session) -> None:
    """Notice training that no rank averages, from now on."""
    if session.world.size > 1:
        _replace_methods()
