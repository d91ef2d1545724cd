"""`data_parallel` makes a Keras model train on all ranks; model_methods.py has the methods that it gets."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import keras

from hvpipe.errors import HvpipeError
from hvpipe.keras.data_parallel.bucket_reduce import ReduceOptions
from hvpipe.keras.data_parallel.compressed_reduce import check_gradient_compression
from hvpipe.keras.data_parallel.copies import keep_in_copies
from hvpipe.keras.data_parallel.elastic import Elastic, check_elastic
from hvpipe.keras.data_parallel.model_methods import DataParallel
from hvpipe.keras.data_parallel.nonfinite import chosen_policy
from hvpipe.keras.data_parallel.overlap import OverlapOptions, RoundOptions
from hvpipe.keras.data_parallel.overlap_modes import overlap_named
from hvpipe.keras.data_parallel.samples import SamplesIn
from hvpipe.keras.data_parallel.train_steps import TrainSteps
from hvpipe.keras.data_parallel.verify import chosen_interval
from hvpipe.keras.gpu import computes_with_onednn
from hvpipe.keras.instance_methods import InstanceMethods
from hvpipe.keras.named.sync_batch_norm import normalise_over_ranks
from hvpipe.keras.supported import described_type
from hvpipe.plan.compression import MOST_RANKS, compression_named
from hvpipe.session import Session, current

Model = TypeVar("Model", bound=keras.Model)

logger = logging.getLogger("hvpipe")


def data_parallel(
    model: Model,
    overlap: str = "step",
    *,
    every: int | None = None,
    fragments: int = 1,
    outer_learning_rate: float = 1.0,
    outer_momentum: float = 0.0,
    compression: str | None = None,
    bucket_bytes: int | None = None,
    warmup_steps: int = 100,
    sync_batch_norm: bool = False,
    verify_every: int | None = None,
    nonfinite: str | None = None,
    samples: Callable[[Any], Any] | None = None,
    link: str | None = None,
) -> Model:
    """Make `fit`, `train_on_batch` and `evaluate` of a model train on all ranks.

    Each rank trains on its own batches (see `shard`), whose sizes may differ. Gradients are averaged over
    all ranks, weighted by samples. Before the first step all ranks take rank 0's weights, optimizer state
    and seeds. A later `fit` compares weights and optimizer state first; if a rank differs, all take rank 0's.
    Metrics and losses in logs are means over all ranks.

    The weights that you see are finished ones, in callbacks and after `train_on_batch` as well. Code that
    runs during a step (another thread, a callback with `reads_weights = False`) must read weights through
    the model (`get_weights`, `save`, `evaluate`, ...), not through a layer or variable: only the model knows
    of the pending update. The same holds after `train_on_batch` with "stale".

    Args:
        model: A Keras 3 model, compiled before its first step. Its methods are replaced on the instance; its
            class, configuration and saved form stay as they are.
        overlap: When gradients are reduced. "none": after backward. "backward": during backward. "step": also
            during the next step's forward. These three give the same weights, bit for bit. "stale": gradients
            are applied one step late. This is faster on slow links, but is a different algorithm with
            different results (Pipe-SGD: Li et al., NeurIPS 2018). "local": each rank updates with its own
            gradients, and ranks average what `every` steps have changed, while they take the next steps. This
            is for links on which "step" waits most of the time. It is a different algorithm, too (DaSGD:
            Zhou et al., 2020); docs/data-parallel.md has the formula.
        every: Steps in a round. Required with "local", refused otherwise.
        fragments: With "local": parts of the model, of about equally many bytes, whose rounds end in turn,
            each `every / fragments` steps after the one before (Streaming DiLoCo: Douillard et al., 2025).
            Averages are then late by so many steps instead of by `every`, and the link is used evenly.
        outer_learning_rate: With "local": the learning rate of the step on the averaged changes. 1 with
            `outer_momentum=0` averages weights. DiLoCo (Douillard et al., 2023) has 0.7 and 0.9, for
            rounds of hundreds of steps.
        outer_momentum: With "local": the Nesterov momentum of that step, from 0 to below 1.
        compression: What float32 gradients are sent as. None: float32. "bf16" or "fp16": this type. "int8": a
            byte, with a scale for each 256 numbers, on up to 63 ranks. "powersgd:R": matrices as factors of
            rank R (after Vogels et al., NeurIPS 2019). The last two give other results: what a rank leaves
            out of a step's sum, it adds to its next gradient. With "local" they compress what rounds
            changed.
        bucket_bytes: Size of a fused buffer of gradients, in bytes. None: HVPIPE_BUCKET_BYTES, else 4 MiB (by
            NCCL 25 MiB), or an eighth of the gradients if that is less (at least 64 KiB).
        warmup_steps: With "stale", "int8" or "powersgd:R", how many steps without it come first. With
            "local", rounds that end within these steps wait for their average, without overlap. A large
            number makes every round wait.
        sync_batch_norm: Whether the model's BatchNormalization layers normalise by the batches of all ranks
            together, as `SyncBatchNormalization`; the default is each rank's own batch.
        verify_every: After each N-th step, compare a checksum of each weight, seed and slot over ranks,
            and raise MismatchError on all ranks if one differs. None: HVPIPE_VERIFY, else never.
        nonfinite: What to do if the sum of all ranks' gradients has a NaN or Inf. "raise": raise HvpipeError
            on all ranks. "skip": leave weights and optimizer as they are, for this step; then no update
            starts before all gradients are reduced. "ignore": update all the same. None: HVPIPE_NONFINITE,
            else "ignore".
        samples: A function of a batch, as `train_step` gets it, that returns how many samples it has: what
            your loss divides by. Ranks are weighted by it. None: the length of the first target that has a
            loss; else of the targets, else of the sample weights, else of the inputs, which must agree.
        link: "slow" takes the place of `overlap`, `every`, `fragments` and `compression`: it chooses an
            algorithm for slow links, with other results, and says which. None: as the other arguments say.

    Returns:
        The same model.

    Raises:
        HvpipeError: For an unknown `overlap`, `compression` or `nonfinite`, a `bucket_bytes` or
            `verify_every` below 1, an `every` that "local" lacks or another mode has, options that "local"
            rules out, a model that is not of Keras 3, or before `hvpipe.init()`.

    Example:
        ```python
        import hvpipe.keras as hk

        hk.init()
        model = hk.data_parallel(keras.Sequential([keras.layers.Dense(10)]))
        model.compile("adam", "mse")
        model.fit(hk.shard(dataset), epochs=3)
        ```
    """
    fragments = _whole_number("fragments", fragments, 1)
    warmup_steps = _whole_number("warmup_steps", warmup_steps, 0)
    again = functools.partial(
        data_parallel,
        overlap=overlap,
        every=every,
        fragments=fragments,
        outer_learning_rate=outer_learning_rate,
        outer_momentum=outer_momentum,
        compression=compression,
        bucket_bytes=bucket_bytes,
        warmup_steps=warmup_steps,
        sync_batch_norm=sync_batch_norm,
        verify_every=verify_every,
        nonfinite=nonfinite,
        samples=samples,
    )
    if link is not None:
        return _for_link(link, again, model)
    mode = overlap_named(overlap)
    rounds = RoundOptions(every, outer_learning_rate, outer_momentum, warmup_steps, fragments)
    mode.check_rounds(overlap, rounds)
    if not isinstance(model, keras.Model):
        raise HvpipeError(f"data_parallel needs a keras.Model of Keras 3. Received: {described_type(model)}")
    session = current()
    check_elastic(session, overlap, mode.exact, sync_batch_norm)
    compresses = _compresses(session, overlap, compression)
    previous = DataParallel.of(model)
    if previous is not None:
        previous.detach()
    if bucket_bytes is not None and bucket_bytes < 1:
        raise HvpipeError(f"bucket_bytes should be positive. Received: bucket_bytes={bucket_bytes}")
    verify_every = chosen_interval(session, verify_every)
    nonfinite = chosen_policy(session, nonfinite)
    mode.check_options(nonfinite, verify_every, sync_batch_norm)
    if not (samples is None or callable(samples)):
        raise HvpipeError(f"samples should be a function of a batch, or None. Received: samples={samples!r}")
    if sync_batch_norm:
        normalise_over_ranks(model)
    methods = InstanceMethods(model)
    options = ReduceOptions(compression, bucket_bytes, nonfinite=nonfinite)
    overlap_options = OverlapOptions(warmup_steps, rounds, session.settings.elastic)
    counting = SamplesIn(model, samples, strict=session.world.size > 1)
    steps = TrainSteps(
        session, model, methods, mode, overlap_options, options, counting, verify_every, sync_batch_norm
    )
    elastic = None
    if session.settings.elastic and session.world.size > 1:
        elastic = Elastic(session, model, steps.updates, steps.untrained, steps.train_counter)
        steps.around = elastic.around
    told = {name: again.keywords[name] for name in ("overlap", "compression", "every", "fragments")}
    told["refuses"] = ["local"] if nonfinite != "ignore" or verify_every or sync_batch_norm else []
    told["refuses"] += ["local", "int8"] if session.settings.elastic else []
    told["warmup_steps"] = warmup_steps if compresses or not mode.exact else 0
    told["onednn"] = computes_with_onednn()
    session.trained_with = told
    DataParallel(model, methods, steps, elastic).attach()
    keep_in_copies(model, again)
    return model


def _compresses(session: Session, overlap: str, compression: str | None) -> bool:
    """Return whether gradients are sent as int8 or factors. Raises HvpipeError if they cannot be."""
    check_gradient_compression(session, compression)
    compresses = compression_named(compression) is not None
    if compresses and not overlap_named(overlap).compresses:
        raise HvpipeError(
            f'overlap="{overlap}" needs compression=None, "bf16" or "fp16": use "step" with others. '
            f"Received: compression={compression!r}"
        )
    return compresses


def _whole_number(name: str, value: Any, least: int) -> int:
    if hasattr(value, "__index__") and not isinstance(value, bool) and int(value) >= least:
        return int(value)
    raise HvpipeError(f"{name} should be a whole number, at least {least}. Received: {name}={value!r}")


_FOR_SLOW_LINKS: Mapping[str, Any] = {"overlap": "local", "every": 4, "fragments": 4, "compression": "int8"}


def _for_link(link: str, again: functools.partial[Any], model: Model) -> Model:
    """Make a model train as its link asks, and say how."""
    if link != "slow":
        raise HvpipeError(f'link should be "slow" or None. Received: link={link!r}')
    usual, asked = inspect.signature(data_parallel).parameters, again.keywords
    chosen = dict(_FOR_SLOW_LINKS)
    names = [*chosen, "outer_learning_rate", "outer_momentum"]
    given = [f"{name}={asked[name]!r}" for name in names if asked[name] != usual[name].default]
    if given:
        raise HvpipeError(
            f'link="slow" chooses {", ".join(names)}: leave them out. Received: {", ".join(given)}'
        )
    world = current().world
    if world.size > MOST_RANKS:
        chosen["compression"] = "bf16"
    if isinstance(model, keras.Model) and model.built:
        trained = max(1, len(model.trainable_variables))
        most = min(chosen["fragments"], trained)
        chosen["fragments"] = max(p for p in range(1, most + 1) if chosen["every"] % p == 0)
    found: Model = again(model, **chosen)
    if world.rank == 0 and world.size > 1:
        logger.warning(
            'hvpipe: link="slow" trains with %s. Each rank updates with its own gradients and averages come '
            "late, so results differ from those of the default.",
            ", ".join(f"{name}={value!r}" for name, value in chosen.items()),
        )
    return found
