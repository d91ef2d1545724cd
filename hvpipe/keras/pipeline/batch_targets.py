"""Targets of a pipeline's batches: flat, in words, and as the rank has them whose batches count."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError, MismatchError
from hvpipe.keras.pipeline.step import Batch
from hvpipe.session import Session


def flat_targets(structure: Any) -> list[Any]:
    """The tensors of (y, sample_weight), without what is None."""
    return [tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(structure) if leaf is not None]


def check_samples(batch: Batch) -> None:
    """Micro-batches are cut from all tensors alike."""
    inputs, targets = ([x.shape[0] if x.shape else 0 for x in of] for of in (batch.inputs, batch.targets))
    if {*inputs, *targets} != {batch.samples}:
        raise HvpipeError(
            "All inputs, targets and sample weights of a batch should have as many samples. "
            f"Received: {inputs} of inputs, {targets} of targets and sample weights"
        )


def paths_of(structure: Any) -> list[Any]:
    """Where in (y, sample_weight) which target is, the flat order of which says nothing by itself."""
    return [path for path, leaf in keras.tree.flatten_with_path(structure) if leaf is not None]


def in_words(structure: Any, signature: Sequence[Any]) -> str:
    """The structure, dtypes and axes of (y, sample_weight), in words that differ where these do."""
    named = [
        f"{'/'.join([('y', 'sample_weight')[int(path[0])], *map(str, path[1:])])} of {spec.dtype.name} "
        f"with {spec.shape.rank} {'axis' if spec.shape.rank == 1 else 'axes'}"
        for path, spec in zip(paths_of(structure), signature, strict=True)
    ]
    return ", ".join(named) or "no targets"


def signature_of_feeder(session: Session, feeder: int, step: str, structure: Any, batch: Batch) -> list[Any]:
    """What a batch's flat targets look like on world rank `feeder`, whatever the batch size; collective.

    `step` says what all ranks are at. A rank reads the targets that the feeder sends as those of its own
    batch: their sizes may differ, but MismatchError is raised where structures, dtypes or axes do.
    """
    mine = [tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in batch.targets]
    said = in_words(structure, mine), [spec.shape.as_list() for spec in mine]
    number = float(zlib.crc32(repr(said).encode()))
    told = session.engine.agree(f"{step} on a batch of {batch.samples}", number)
    if len(set(told)) == 1:
        return mine
    everyone = session.engine.allgather_object(said)
    words = [theirs for theirs, _ in everyone]
    other = next((rank for rank, theirs in enumerate(words) if theirs != words[0]), None)
    if other is not None:
        raise MismatchError(
            f"A {step} wants targets and sample weights of the same structure and dtypes on all ranks. "
            f"Received: {words[0]} on rank 0 and {words[other]} on rank {other}"
        )
    _, shapes = everyone[feeder]
    return [tf.TensorSpec(shape, spec.dtype) for shape, spec in zip(shapes, mine, strict=True)]
