"""Brings the data of a resumed `fit` to where it was: the same order of samples, after the same batch.

A dataset that shuffles gets a new order with every iterator that is made of it. Keras makes one for each
epoch, and throws another one away at the end of an epoch whose length it knows:

    steps_per_epoch | length of the dataset | epoch e reads from iterator
    None            | known                 | 2 e + 1
    None            | unknown               | e + 1
    given           | any                   | 1, or where the dataset ends: the next one

So a new process makes as many iterators as the old one has made, and then reads over what was trained on.

Where the number of ranks has changed since that iterator was made, steps do not tell how far it was read.
Then a checkpoint notes that itself:

    source    batches of the dataset that all ranks share, in this epoch
    read      batches of each rank's own dataset, over all epochs, with steps_per_epoch
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvpipe.checkpoints.manifest import Manifest
from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import dataset_of
from hvpipe.keras.data_parallel.shards import source_of
from hvpipe.keras.fit_call import FitCall

logger = logging.getLogger("hvpipe")

SOURCE, READ, FIRST_EPOCH, WITHIN = "source", "read", "first_epoch", "within"  # notes of rank 0's part


@dataclass(frozen=True)
class OwnRank:
    """This rank, how many there are now, and how each counts the samples of a batch."""

    rank: int
    size: int
    samples_in: Callable[[Any], Any]


@dataclass(frozen=True)
class ResumedReading:
    """Where the first epoch of a resumed `fit` reads.

    Attributes:
        iterator: What steps read from, in place of Keras's iterator; None: Keras's own.
        skipped: Batches of the epoch that are not trained on again.
        source: How many batches of the dataset of all ranks were read over, if steps do not tell.
        read: The same of this rank's dataset over all epochs, if there is one iterator for them.
    """

    iterator: Any
    skipped: int
    source: int | None = None
    read: int | None = None

    def notes(self, steps: int, ranks: int) -> dict[str, int]:
        """Return what a checkpoint must note after `steps` more steps on `ranks` ranks."""
        found = {} if self.source is None else {SOURCE: self.source + steps * ranks}
        return found if self.read is None else {**found, READ: self.read + steps}


def epochs_read(manifest: Manifest) -> int:
    """Return how many epochs `fit` has finished. It may have begun with a later one than the first."""
    return manifest.position.epoch - int(manifest.parts[0].notes.get(FIRST_EPOCH, 0))


def has_metrics(manifest: Manifest) -> bool:
    """Return whether a checkpoint has the metrics of its epoch so far.

    It does not at an epoch's end, nor if a callback stopped within the epoch: a validation may have followed.
    """
    return manifest.position.batch > 0 and not manifest.parts[0].notes.get(WITHIN)


def resumed_reading(
    iterator: Any,
    fit_call: FitCall,
    length: int | None,
    manifest: Manifest,
    ranks: OwnRank,
    steps_per_execution: int = 1,
) -> ResumedReading:
    """Read over what was trained on before the checkpoint.

    Args:
        iterator: Keras's iterator in the first epoch of the resumed `fit`, unread.
        fit_call: The `fit`.
        length: The batches of an epoch, None if Keras does not know them.
        manifest: The checkpoint.
        ranks: The ranks that resume.
        steps_per_execution: Batches that a call of the train function takes.
    """
    dataset = dataset_of(iterator)
    if not isinstance(dataset, tf.data.Dataset):
        raise HvpipeError(
            "To resume, data should reach fit as a tf.data.Dataset, arrays or a PyDataset. "
            f"Received: {type(iterator).__name__}"
        )
    epoch, batch = epochs_read(manifest), manifest.position.batch
    if fit_call.steps_per_epoch is None:
        made = epoch if length is None else 2 * epoch
    elif int(dataset.cardinality()) == fit_call.steps_per_epoch:
        made = epoch
    else:
        calls = -(-fit_call.steps_per_epoch // steps_per_execution)
        return _within_one_iterator(iterator, dataset, calls * steps_per_execution, manifest, ranks)
    if isinstance(fit_call.x, keras.utils.PyDataset):
        made = 0  # its order comes from Python's random numbers, not from the number of the iterator
    if manifest.ranks != ranks.size or SOURCE in manifest.parts[0].notes:
        return _on_other_ranks(iterator, dataset, fit_call, length, manifest, ranks, made)
    found = _after(iterator, dataset, made)
    _read_over(found, batch)
    return ResumedReading(None if found is iterator else found, batch)


def _after(first: Any, dataset: Any, made: int) -> Any:
    """Return iterator number `made` of a dataset, where `first` is number 0. Makes those in between."""
    found = first
    for _ in range(made):
        found = iter(dataset)
    return found


def _within_one_iterator(
    iterator: Any, dataset: Any, steps_per_epoch: int, manifest: Manifest, ranks: OwnRank
) -> ResumedReading:
    """Read on in the one iterator that Keras keeps over all epochs."""
    position = manifest.position
    length = int(dataset.cardinality())
    before = epochs_read(manifest) * steps_per_epoch
    if 0 <= length <= before:
        raise HvpipeError(
            "With steps_per_epoch, a dataset should repeat() to be resumed after its first pass. "
            f"Received: {length} batches, steps_per_epoch={steps_per_epoch} and epoch {position.epoch + 1}"
        )
    if manifest.ranks == ranks.size:
        noted = manifest.parts[0].notes.get(READ)
        _read_over(iterator, before + position.batch if noted is None else noted)
        return ResumedReading(None, position.batch, read=noted)
    earlier = (position.samples - position.epoch_samples) / ranks.size
    first, samples = _read_over_samples(iterator, earlier, ranks)
    batches, more = _read_over_samples(iterator, position.samples / ranks.size - samples, ranks)
    _tell(position.samples - (samples + more) * ranks.size, ranks)
    return ResumedReading(None, batches, read=first + batches)


def _read_over(iterator: Any, batches: int) -> None:
    for done in range(batches):
        try:
            next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            raise HvpipeError(
                "The data should be the same as before the checkpoint. Received: it ends after "
                f"{done} of {batches} batches that were trained on"
            ) from None


# --- On a different number of ranks -------------------------------------------------------------------------


def _on_other_ranks(
    iterator: Any,
    dataset: Any,
    fit_call: FitCall,
    length: int | None,
    manifest: Manifest,
    ranks: OwnRank,
    made: int,
) -> ResumedReading:
    """Continue after the samples that all ranks have trained on together in this epoch."""
    samples, noted = manifest.position.epoch_samples, manifest.parts[0].notes.get(SOURCE)
    source = source_of(fit_call.x)
    if source is not None and made > 0:
        found = _after(None, source, made)  # Keras's own was the first
        if noted is None:
            noted, read = _read_over_samples(found, samples, ranks)
            _tell(samples - read, ranks)
        else:
            _read_over(found, noted)
        left = max(0, int(source.cardinality()) - noted) // ranks.size
        skipped = noted // ranks.size if length is None else length - left
        return ResumedReading(_rounds(found, ranks), skipped, source=noted)
    found = _after(iterator, dataset, made)
    if noted is not None:  # by an elastic job, in the first epoch
        rounds = -(-noted // ranks.size)
        _read_over(found, rounds)
        _tell(noted - rounds * ranks.size, ranks, "batches")
        return ResumedReading(None if found is iterator else found, rounds)
    batches, read = _read_over_samples(found, samples / ranks.size, ranks)
    _tell(samples - read * ranks.size, ranks)
    return ResumedReading(None if found is iterator else found, batches)


def _read_over_samples(iterator: Any, samples: float, ranks: OwnRank) -> tuple[int, float]:
    """Read batches until they hold this many samples; return how many batches and samples that were."""
    batches, found = 0, 0.0
    while found + 0.5 < samples:  # a checkpoint has rounded what `samples=` counts
        try:
            batch = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            break
        batches += 1
        found += float(ranks.samples_in(batch))
    return batches, found


def _rounds(iterator: Any, ranks: OwnRank) -> Iterator[Any]:
    """Yield this rank's batches of a dataset that all ranks read, as `shard` does."""
    while True:
        batches = []
        for _ in range(ranks.size):
            try:
                batches.append(next(iterator))
            except (StopIteration, tf.errors.OutOfRangeError):
                return
        yield batches[ranks.rank]


def _tell(missing: float, ranks: OwnRank, what: str = "samples") -> None:
    if missing and ranks.rank == 0:
        logger.warning(
            "hvpipe: on this number of ranks training cannot continue at exactly the same sample, because no "
            "batch begins there: %g %s of this epoch are %s.",
            abs(missing),
            what,
            "trained on again" if missing > 0 else "left out",
        )
