"""Targets and sample weights of a pipeline's batches: flattened, described, and agreed on by all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError, MismatchError
from hvpipe.keras.pipeline.microbatches import Batch
from hvpipe.session import Session


def flat_targets(structure: Any) -> list[Any]:
    """Return the tensors of (y, sample_weight), without those that are None."""
    return [tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(structure) if leaf is not None]


def check_samples(batch: Batch) -> None:
    """Raise HvpipeError unless all tensors of a batch have the same number of samples: they are cut alike."""
    inputs, targets = ([x.shape[0] if x.shape else 0 for x in of] for of in (batch.inputs, batch.targets))
    if {*inputs, *targets} != {batch.samples}:
        raise HvpipeError(
            "All inputs, targets and sample weights of a batch should have the same number of samples. "
            f"Received: {inputs} of inputs, {targets} of targets and sample weights"
        )


def describe_targets(structure: Any, signature: Sequence[Any]) -> str:
    """Describe the structure, dtypes and axes of (y, sample_weight); equal texts mean equal targets."""
    named = [
        f"{'/'.join([('y', 'sample_weight')[int(path[0])], *map(str, path[1:])])} of {spec.dtype.name} "
        f"with {spec.shape.rank} {'axis' if spec.shape.rank == 1 else 'axes'}"
        for path, spec in zip(_paths(structure), signature, strict=True)
    ]
    return ", ".join(named) or "no targets"


def common_signature(
    structure: Any, signature: Sequence[Any], other_structure: Any, other_signature: Sequence[Any]
) -> list[Any] | None:
    """Return a signature that fits both kinds of targets; axes that differ are left open (None).

    None if structures, dtypes or numbers of axes differ.
    """
    if _paths(structure) != _paths(other_structure):
        return None
    pairs = list(zip(signature, other_signature, strict=True))
    if any(own.dtype != other.dtype or own.shape.rank != other.shape.rank for own, other in pairs):
        return None
    return [
        tf.TensorSpec([m if m == n else None for m, n in zip(own.shape, other.shape, strict=True)], own.dtype)
        for own, other in pairs
    ]


def agreed_signature(session: Session, data_rank: int, step: str, structure: Any, batch: Batch) -> list[Any]:
    """Return a tf.TensorSpec for each flat target of `data_rank`, with the batch size open; collective.

    Args:
        session: The session.
        data_rank: The world rank whose batches count.
        step: Names the step, which must be the same on all ranks.
        structure: (y, sample_weight) of this rank's batch.
        batch: This rank's batch. Its sizes may differ from the data rank's.

    Returns:
        The signature.

    Raises:
        MismatchError: Structure, dtypes or numbers of axes differ between ranks. A rank unpacks the targets
            of `data_rank` by the structure of its own batch, so these must agree.
    """
    mine = [tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in batch.targets]
    described = describe_targets(structure, mine), [spec.shape.as_list() for spec in mine]
    checksum = float(zlib.crc32(repr(described).encode()))
    checksums = session.engine.agree(f"{step} on a batch of {batch.samples}", checksum)
    if len(set(checksums)) == 1:
        return mine
    everyone = session.engine.allgather_object(described, f"{step} (targets)")
    words = [theirs for theirs, _ in everyone]
    other = next((rank for rank, theirs in enumerate(words) if theirs != words[0]), None)
    if other is not None:
        raise MismatchError(
            f"A {step} needs targets and sample weights of the same structure and dtypes on all ranks. "
            f"Received: {words[0]} on rank 0 and {words[other]} on rank {other}"
        )
    _, shapes = everyone[data_rank]
    return [tf.TensorSpec(shape, spec.dtype) for shape, spec in zip(shapes, mine, strict=True)]


def _paths(structure: Any) -> list[Any]:
    """Return the path of each target in (y, sample_weight)."""
    return [path for path, leaf in keras.tree.flatten_with_path(structure) if leaf is not None]
