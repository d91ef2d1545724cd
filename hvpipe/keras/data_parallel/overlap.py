"""The pipelined step: what `optimizer.apply` becomes, and what a training step begins with.

Linear   | forward | backward | reduce all | update all |
backward | forward | backward ......| update of the last buckets |
                        reduce  reduce  reduce
step     | update, forward | backward | update, forward | backward |
                               reduce  reduce reduce reduce

In "step", call t of the train function begins by collecting, bucket by bucket, what call t - 1 submitted
and updating those variables. TensorFlow orders by data flow, so a layer's forward waits for its own
variables alone. In "stale" the collecting comes after backward, with the gradients of call t - 1 (Pipe-SGD:
Li et al., NeurIPS 2018).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras import ops
from hvpipe.keras.data_parallel.bucket_reducer import (
    Reducer,
    counted_alike,
    dense,
    identity,
    name_of,
    native,
    note_collected,
)
from hvpipe.keras.data_parallel.optimizer_update import acts_by_variable, apply_all, apply_some, count_step
from hvpipe.keras.gpu import on_the_host
from hvpipe.plan.buckets import Bucket
from hvpipe.session import Session

OVERLAPS = ("none", "backward", "step", "stale")


def check_overlap(overlap: str) -> None:
    """Raise unless it is one that hvpipe knows."""
    if overlap not in OVERLAPS:
        wanted = ", ".join(repr(name) for name in OVERLAPS)
        raise HvpipeError(f"overlap should be one of {wanted}. Received: overlap={overlap!r}")


def applied_outside(optimizer: Any) -> HvpipeError:
    """What a loop of the user's own is told that updates with the optimizer of a data_parallel model."""
    return HvpipeError(
        "data_parallel reduces gradients in fit and train_on_batch; in a loop of your own wrap the optimizer "
        "in hvpipe.keras.DistributedOptimizer, without data_parallel. "
        f"Received: an update by {optimizer.name} outside of them"
    )


class OverlappedOptimizer:
    """Puts the engine between an optimizer's gradients and its update; `optimizer.apply` calls `apply` here.

    `variables` are those that have gradients, `tables` those that have them in few rows (see Reducer).
    `defers` says whether updates may happen in the next step: then `begin` must be called at the start of
    every step, `end` at its end, and `flush` before weights are read. Where tracing fails, `other_variables`
    says for which variables to plan anew, and `used_early` which rule out putting updates off, if that was
    why.
    """

    def __init__(
        self,
        session: Session,
        optimizer: Any,
        variables: Sequence[Any],
        overlap: str,
        compression: str | None,
        bucket_bytes: int | None,
        warmup_steps: int = 0,
        tables: Collection[int] = (),
    ) -> None:
        if overlap == "stale" and optimizer.gradient_accumulation_steps:
            raise HvpipeError(
                'overlap="stale" wants an update at every step. Received: an optimizer with '
                f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}"
            )
        if overlap == "stale" and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise HvpipeError(
                'overlap="stale" wants gradients that are not scaled: those of one step would be unscaled by '
                "the scale of the next. Use another overlap, or the policy mixed_bfloat16. "
                f"Received: optimizer {optimizer.name}, a LossScaleOptimizer"
            )
        self._session = session
        self.optimizer = optimizer
        self.overlap = overlap
        self.warmup_steps = warmup_steps
        # In "stale" what the next step collects is all of this one's: urgent buckets of this step would make
        # those of the step before wait, and with them its update.
        self._make_reducer = functools.partial(
            Reducer,
            session,
            optimizer.name,
            compression=compression,
            bucket_bytes=bucket_bytes,
            in_turn=overlap == "stale",
            tables=tables,
        )
        self._reducers: dict[tuple[int, ...], Reducer] = {}
        self._plan(variables)
        self._by_variable = acts_by_variable(optimizer, variables)
        self._traced = session.settings.trace_path is not None
        self.other_variables: list[Any] = []
        self.used_early: list[str] = []
        self._samples: Any = None
        self._in_step = False
        self._applied = False
        self._finished: list[Any] = []
        self._graph: Any = None  # of the step
        # Its operations when `apply` was done: what a step in "step" does later is too early.
        self._operations_then: int | None = None
        with tf.init_scope():
            with on_the_host():
                # Of the last submits, into the next step: 0 where nothing waits to be collected.
                self._token = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvpipe_token")
            self._marks = tf.Variable(0.0, dtype=tf.float32, trainable=False, name="hvpipe_marks")

    @property
    def defers(self) -> bool:
        return self.overlap in ("step", "stale")

    def hook(self) -> None:
        """Replace `apply` on the optimizer instance; its class, config and saved form stay as they are.

        From then on an update is refused that does not come between `begin` and `end`.
        """
        self.optimizer.apply = self._apply_in_step
        if self._traced:
            scale_loss = type(self.optimizer).scale_loss
            self.optimizer.scale_loss = lambda loss: self._marked(scale_loss(self.optimizer, loss))

    def _apply_in_step(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if not self._in_step:
            raise applied_outside(self.optimizer)
        self.apply(grads, trainable_variables)

    def _begun(self, data: Any) -> Any:
        """The batch, passed through a mark: what only control edges lead to, grappler removes."""
        leaves = tf.nest.flatten(data)
        first = next((place for place, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor)), None)
        if first is None:
            return data
        with on_the_host():
            leaves[first] = ops.mark(leaves[first], "begin")
        return tf.nest.pack_sequence_as(data, leaves)

    def _marked(self, loss: Any) -> Any:
        loss = ops.mark(loss, "forward")
        # No gradient needs its value: without this use grappler would remove the mark.
        self._marks.assign(tf.cast(tf.reduce_sum(loss), tf.float32))
        return loss

    def unhook(self) -> None:
        """Give the optimizer its own methods back, and the buffers; nothing here can be used after."""
        for name in ("apply", "scale_loss"):
            vars(self.optimizer).pop(name, None)
        for reducer in self._reducers.values():
            reducer.end()

    def begin(self, samples: Any, data: Any) -> Any:
        """Start of a step with a batch of `samples` (scalar tensor) here; its data, for the forward."""
        self._samples = samples
        self._in_step = True
        self._applied = False
        self._graph = tf.compat.v1.get_default_graph()
        self._operations_then = None
        if self.overlap == "step":
            # Only where there is a batch: the call that finds the data at its end runs what needs no data,
            # and stops anywhere.
            with tf.control_dependencies([samples]):
                token = self._token.read_value()
            self._finished = self._finish(token)
            # Ordered after everything above that reads it, before this step's submits.
            with on_the_host():
                self._token.assign(tf.zeros_like(token))
        return self._begun(data) if self._traced else data

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Stand in for `optimizer.apply`: reduce, and update as the overlap says."""
        known = self.optimizer._trainable_variables
        variables = list(known if trainable_variables is None else trainable_variables)
        gradients = self._in_plan_order(grads, variables)
        samples = counted_alike(gradients) if self._samples is None else self._samples
        if self._applied and self.defers:
            raise HvpipeError(
                f"overlap={self.overlap!r} wants one call of the optimizer in train_step; with several, use "
                'overlap="backward". Received: a second call in one step'
            )
        in_graph = self.overlap == "step" and not tf.executing_eagerly()
        if in_graph and tf.compat.v1.get_default_graph() is not self._graph:
            # What the step does later is out of sight.
            self.used_early = ["weights, for all one can tell from outside its tf.function or branch,"]
            raise HvpipeError("the update is in a graph of its own")
        self._applied = True
        steps = self.optimizer.gradient_accumulation_steps
        if steps:
            self._accumulate(gradients, samples, int(steps))
        else:
            self._reduce_and_update(gradients, self.reducer.announce(samples))
        if in_graph:
            self._operations_then = len(self._graph.get_operations())

    def end(self) -> None:
        """End of a step's graph: in "step", refuse one that touches variables after `apply`."""
        self._in_step = False
        if self._operations_then is None:
            return
        later = self._graph.get_operations()[self._operations_then :]
        taken = {id(tensor) for operation in later for tensor in operation.inputs}
        touched = {id(outside) for outside, inside in self._graph.captures if id(inside) in taken}
        scaled = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        rate = getattr(scaled, "_learning_rate", None)  # no update changes it
        watched = [*self.reducer.variables, *(v for v in self.optimizer.variables if v is not rate)]
        self.used_early = [name_of(v) for v in watched if id(native(v).handle) in touched]
        if self.used_early:
            raise HvpipeError("weights are used before their update")

    def flush(self) -> None:
        """Finish updates that wait for the next step; weights are then those after the last step."""
        if self.defers:
            self._flush()

    # --- Gradients of this step --------------------------------------------------------------------

    def _plan(self, variables: Sequence[Any]) -> None:
        key = tuple(identity(v) for v in variables)
        if key not in self._reducers:
            self._reducers[key] = self._make_reducer(variables=variables)
        self.reducer: Reducer = self._reducers[key]
        self._flush = tf.function(self._flush_in_graph, autograph=False)

    def _in_plan_order(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        found = {identity(v): g for g, v in zip(grads, variables, strict=True) if g is not None}
        if found.keys() != {identity(v) for v in self.reducer.variables}:
            used = [v for v in variables if identity(v) in found]
            if not used:
                raise HvpipeError(
                    "Training wants at least one trainable variable with a gradient. "
                    f"Received: None for all {len(variables)} gradients"
                )
            if self.defers and not tf.executing_eagerly():
                # This graph has begun with the old plan. AutoGraph may replace the error on its way, but
                # not what is noted here.
                self.other_variables = used
                raise HvpipeError("the trainable variables with a gradient are others than planned")
            self.optimizer._check_variables_are_known(used)
            self._plan(used)
        if any(g is None for g in grads) and self._session.world.rank == 0:
            self.optimizer._filter_empty_gradients(grads, variables)  # warns of them, as in plain Keras
        return [dense(found[identity(v)]) for v in self.reducer.variables]

    def _reduce_and_update(self, gradients: Sequence[Any], scale: Any) -> None:
        if self.overlap == "none":
            # The linear baseline: nothing is sent before all of backward, nothing updated before all is sent.
            tokens = self.reducer.submit(scale, gradients, after=lambda _: gradients)
            with tf.control_dependencies(tokens):
                reduced = self.reducer.collect_all(tokens)
            with tf.control_dependencies(reduced):
                apply_all(self.optimizer, [tf.identity(g) for g in reduced], self.reducer.variables)
            if self._traced:
                last = self.reducer.plan.by_need()[-1][1].name
                self._note([self._done(self.reducer.variables, last)])
        elif self.overlap == "backward":
            tokens = self.reducer.submit(scale, gradients)
            for done in self._update(tokens):
                note_collected(done)
        elif self.overlap == "step":
            # A gradient may be there before its bucket's update is: that of a linear loss needs no weights.
            tokens = self.reducer.submit(scale, gradients, after=lambda bucket: [self._finished[bucket]])
            with on_the_host():
                self._token.assign(tf.add_n(tokens))
        else:
            self._update_stale(gradients, scale)

    def _update_stale(self, gradients: Sequence[Any], scale: Any) -> None:
        """Update with the gradients of the step before, then leave this step's to the next one.

        During the warm-up the step's own gradients are used at once, as in "backward".
        """
        with tf.control_dependencies([scale]):
            before = self._token.read_value()
        finished = self._finish(before)
        tokens = self.reducer.submit(scale, gradients, after=lambda bucket: [finished[bucket]])
        with on_the_host():
            token = tf.add_n(tokens)
            exact = self.reducer.step <= self.warmup_steps

        def finish_now() -> Any:
            with tf.control_dependencies(self._finish(token)), on_the_host():
                return tf.zeros_like(token)

        self._token.assign(tf.cond(exact, finish_now, lambda: tf.identity(token)))

    # --- Accumulation: micro-steps add up locally, the last one reduces ---------------------------------

    def _accumulate(self, gradients: Sequence[Any], samples: Any, steps: int) -> None:
        """As Keras: every call adds, every `steps`-th call updates with the mean.

        Each micro-step is weighted by its share of all ranks' samples before it is added, so that the sum
        equals that of one rank with the whole batch; the sum itself is then added up over ranks.
        """
        optimizer, variables = self.optimizer, self.reducer.variables
        # Not `iterations`, which counts updates under accumulation.
        with tf.control_dependencies([samples]):
            boundary = tf.equal((native(optimizer._iterations) + 1) % steps, 0)
        share = self.reducer.announce(samples, reduces=boundary)
        weighted = [gradient * tf.cast(share, gradient.dtype) for gradient in gradients]
        sums = [optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in variables]

        def at_boundary() -> Any:
            # `apply` unscales what it is given, not what it has accumulated; and it adds the two, so the
            # accumulators must be empty when the reduced sum comes back.
            unscale = optimizer.loss_scale_factor or 1.0
            totals = [g + native(s).read_value() * unscale for g, s in zip(weighted, sums, strict=True)]
            with tf.control_dependencies(totals):
                for accumulator in sums:
                    native(accumulator).assign(tf.zeros_like(native(accumulator)))
            self._reduce_and_update(totals, tf.constant(1.0, tf.float64))
            return tf.constant(0)

        def between() -> Any:
            apply_all(optimizer, weighted, variables)
            return tf.constant(0)

        tf.cond(boundary, at_boundary, between)

    # --- Updates ----------------------------------------------------------------------------------

    def _finish(self, token: Any) -> list[Any]:
        """Collect and update if something was submitted; a tensor for each bucket, there when it is done."""
        return self._update([token] * len(self.reducer.plan.buckets))

    def _update(self, tokens: Sequence[Any]) -> list[Any]:
        """Collect and update where the tokens say so; a tensor for each bucket, there when that is done."""
        buckets = self.reducer.plan.buckets
        done: list[Any]
        if self._by_variable:
            done = [None] * len(buckets)
            for number, bucket in self.reducer.plan.by_need():
                update = functools.partial(self._update_bucket, number, bucket, tokens[number])
                done[number] = self._where_submitted(tokens[number], update)
            with tf.control_dependencies(tokens):
                self._where_submitted(tokens[0], self._count_step)
            self._note(done)
        else:
            with tf.control_dependencies(tokens):
                together = functools.partial(self._update_together, tokens)
                done = [self._where_submitted(tokens[0], together)] * len(buckets)
            self._note(done[:1])
        return done

    def _where_submitted(self, token: Any, update: Callable[[], Any]) -> Any:
        with on_the_host():
            submitted = token > 0
        return tf.cond(submitted, update, lambda: tf.constant(0.0))

    def _count_step(self) -> Any:
        count_step(self.optimizer)
        return tf.constant(0.0)

    def _update_bucket(self, number: int, bucket: Bucket, token: Any) -> Any:
        variables = self.reducer.members(bucket)
        # Weight decay needs no gradient, but must not come before there is one.
        with tf.control_dependencies([token]):
            apply_some(self.optimizer, self.reducer.collect(number, token), variables)
        return self._done(variables, bucket.name)

    def _update_together(self, tokens: Sequence[Any]) -> Any:
        apply_all(self.optimizer, self.reducer.collect_all(tokens), self.reducer.variables)
        return self._done(self.reducer.variables, self.reducer.plan.buckets[0].name)

    def _done(self, variables: Sequence[Any], name: str) -> Any:
        """A scalar that is there once the variables are updated (control dependencies order the reads)."""
        firsts = [tf.reshape(native(v).read_value(), [-1])[:1] for v in variables]
        with tf.control_dependencies(firsts):
            done = tf.identity(tf.cast(tf.reduce_sum(firsts[-1]), tf.float32))
        return ops.mark(done, f"update {name}") if self._traced else done

    def _note(self, marks: Sequence[Any]) -> None:
        # What nobody uses grappler removes; only a traced run pays for keeping the marks.
        if self._traced and marks:
            self._marks.assign(tf.add_n(list(marks)))

    def _flush_in_graph(self) -> None:
        token = self._token.read_value()
        self._finish(token)
        with on_the_host():
            self._token.assign(tf.zeros_like(token))
