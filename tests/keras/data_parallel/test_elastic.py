"""Ranks are killed while they train; the others go on with the weights of a run without the lost ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bench.faults import elastic_job as job
from distributed import Run, run
from hvpipe.checkpoints import folder as folders
from hvpipe.checkpoints.manifest import read_manifest
from hvpipe.environment.settings import Settings
from hvpipe.errors import PeerError
from hvpipe.keras.data_parallel import elastic
from hvpipe.keras.resize import scale_learning_rate
from hvpipe.session import Resize
from hvpipe.trace.events import Trace

LIMIT_S = 240.0
_IMPORTS = f"""
import sys
import time
from pathlib import Path

sys.path.insert(0, {str(Path(job.__file__).parents[2])!r})
from bench.faults import elastic_job as job
"""
_MAIN = """
job.folder = Path(sys.argv[1])
job.main(sys.argv[2], sys.argv[3:])
"""
# The job, in which rank 1 dies while all that are left recover from the loss of another rank.
SECOND_LOSS = f"""{_IMPORTS}
from hvpipe.session import Session

go_on = Session.go_on_without_lost


def dies_after(self):
    change = go_on(self)
    if change.old_rank == 1:
        time.sleep(0.5)  # the others wait for it, to agree on a step
        job.die()
    return change


Session.go_on_without_lost = dies_after
{_MAIN}"""
# The job, in which rank 1 dies while it writes its part of the last checkpoint.
LOSS_AT_THE_END = f"""{_IMPORTS}
import hvpipe
from hvpipe.checkpoints.writer import Writer

write_part = Writer._write_part


def dies_first(self, place, snapshot):
    if hvpipe.rank() == 1 and hvpipe.size() == 3:
        job.die()
    write_part(self, place, snapshot)


Writer._write_part = dies_first
{_MAIN}"""
HVPIPE = (sys.executable, "-m", "hvpipe", "run", "--elastic", "--no-summary")


@dataclass(frozen=True)
class Elastic:
    """A job that lost ranks: what the ranks that are left have told and trained."""

    result: Run
    told: Sequence[dict[str, Any]]
    weights: Sequence[list[Any]]

    def changes(self) -> list[tuple[int, int]]:
        """Return the agreed step and the number of ranks after it, for each loss."""
        return [(step, size) for step, size, _ in self.told[0]["changes"]]


def train(
    folder: Path, ranks: int, overlap: str, kills: Sequence[str], *options: str, script: str = job.__file__
) -> Elastic:
    folder.mkdir(exist_ok=True)
    command = [*HVPIPE, "-np", str(ranks), *options, script, str(folder), overlap, *kills]
    result = run(command, limit_s=LIMIT_S, env={"CHECKPOINTS": "1"} if "--min-np" in options else None)
    return Elastic(
        result,
        [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))],
        [list(np.load(path).values()) for path in sorted(folder.glob("rank-*.npz"))],
    )


def validated(weights: Sequence[Any], size: int) -> float:
    """Return the loss of a model on the batches that so many ranks share."""
    model = job.make_model(False)
    model.set_weights(weights)
    batches = job.make_batches()[: job.BATCHES // size * size]
    x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
    return float(model.evaluate(x, y, batch_size=job.BATCH, verbose=0))


@pytest.mark.parametrize(
    ("ranks", "overlap", "kills", "agreed"),
    [
        # Its gradients of step 3 are missing, so step 2 is the last.
        (3, "none", ["1:3:backward"], {2}),
        # The updates of step 4 are half-way. Then the first rank goes, between two steps, and one is left.
        (3, "step", ["2:4:update", "0:7:begin"], {2, 3, 4, 5, 6, 7}),
        # One is left; with all sums of step 5, or with none of them.
        (2, "backward", ["0:5:update"], {4, 5}),
        # Step 7 is the last of an epoch, with two batches left: those that are left may train on them.
        (3, "step", ["2:7:epoch_end"], {7}),
        (3, "backward", ["2:7:validate"], {7}),
    ],
)
def test_the_others_go_on(
    tmp_path: Path, ranks: int, overlap: str, kills: list[str], agreed: set[int]
) -> None:
    """No step is lost or applied twice, and all that are left have the same bits."""
    found = train(tmp_path, ranks, overlap, kills)
    assert found.result.returncode == 0, found.result.describe()
    left = ranks - len(kills)
    assert [told["size"] for told in found.told] == [left] * left
    assert [told["rank"] for told in found.told] == list(range(left))
    assert [told["epochs"] for told in found.told] == [job.EPOCHS] * left
    changes = found.changes()
    assert [size for _, size in changes] == list(range(ranks - 1, left - 1, -1))
    assert {step for step, _ in changes} <= agreed, found.result.describe()
    for others in found.weights[1:]:
        for mine, theirs in zip(found.weights[0], others, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    reference = job.reference(changes, found.told[0]["epoch_ends"], ranks)
    for mine, wanted in zip(found.weights[0], reference, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-5)
    # Validation, too, has the data of all ranks.
    assert found.told[0]["val_loss"][-1] == pytest.approx(validated(reference, left), abs=1e-5)
    if "validate" in kills[0]:
        first = validated(job.reference(changes, found.told[0]["epoch_ends"][:1], ranks), left)
        assert found.told[0]["val_loss"][0] == pytest.approx(first, abs=1e-5)


def test_a_second_loss_while_the_others_recover(tmp_path: Path) -> None:
    """The sums of step 5 are missing in the flush at the epoch's end, so step 4 is the last, for good."""
    script = tmp_path / "second_loss.py"
    script.write_text(SECOND_LOSS)
    scaling = ("--lr-scaling", "linear")
    found = train(tmp_path, 4, "step", ["2:5:backward"], *scaling, script=str(script))
    assert found.result.returncode == 0, found.result.describe()
    assert found.changes() == [(4, 2)]
    assert [told["changes"][0][2] for told in found.told] == [[1, 2]] * 2
    assert [told["rate"] for told in found.told] == pytest.approx([0.025, 0.025])
    reference = job.reference(found.changes(), found.told[0]["epoch_ends"], 4, factor=0.5)
    for weights in found.weights:
        for mine, wanted in zip(weights, reference, strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-5)


def test_a_loss_in_the_last_checkpoint(tmp_path: Path) -> None:
    """Regression: it ended the job with an error. Those that are left write the checkpoint again.

    And the trace began after the loss.
    """
    script, trace = tmp_path / "loss_at_the_end.py", tmp_path / "trace.json"
    script.write_text(LOSS_AT_THE_END)
    options = ("--min-np", "1", "--trace", str(trace))
    found = train(tmp_path, 3, "step", [], *options, script=str(script))
    assert found.result.returncode == 0, found.result.describe()
    (step,) = [step for step, _ in found.changes()]
    (place,) = folders.complete(tmp_path / "checkpoints")
    manifest = read_manifest(place)
    assert (manifest.position.step, manifest.ranks) == (step, 2)
    read = Trace.read(trace)
    for rank in (0, 1):
        assert step - 1 <= len(read.of("forward", rank)) <= step + 1


def test_too_few_ranks_write_a_checkpoint_and_exit_with_69(tmp_path: Path) -> None:
    """The next start continues from it. The learning rate follows the number of ranks, here 2, 1 and 2."""
    options = ("--min-np", "2", "--lr-scaling", "linear")
    found = train(tmp_path, 2, "step", ["1:4:forward"], *options)
    assert found.result.returncode == 69, found.result.describe()
    assert "--min-np asks for 2" in found.result.output
    assert not found.told
    again = train(tmp_path, 2, "step", [], *options)
    assert again.result.returncode == 0, again.result.describe()
    assert "training resumes from" in again.result.output
    assert [told["rate"] for told in again.told] == pytest.approx([0.05, 0.05])


class StandIn:
    """What an Elastic sees of its session and of its updates, on the first rank of a job that loses two of 4.

    Args:
        others: For each exchange, the answers of the other ranks as changes of this rank's; None: it fails.
    """

    def __init__(self, others: Sequence[list[dict[str, Any]] | None]) -> None:
        self.world = SimpleNamespace(rank=0, size=4)
        self.settings = SimpleNamespace(lr_scaling="linear", min_ranks=1)
        self.engine, self._others = self, list(others)
        self.run_flush: Callable[[Callable[[], None]], None]  # set by the Elastic
        self.mode = self.reducer = self
        self.ready, self.waits, self.updates_piecewise = True, False, False
        self.step, self.variable = tf.Variable(0), tf.Variable(0)
        self.done: list[int] = []
        self.versions: list[int] = []  # that this rank has offered

    def has_lost_ranks(self) -> bool:
        return True

    def go_on_without_lost(self) -> Resize:
        self.world.size -= 1
        return Resize(self.world.size + 1, self.world.size, 0, 0, (1,))

    def allgather_object(self, value: Any, what: str) -> list[Any]:
        others = self._others.pop(0)
        self.versions.append(value.version)
        if others is None:
            raise PeerError("another rank is lost")
        return [value, *(replace(value, **other) for other in others)]

    def forget(self) -> None:
        self.waits = False

    def completed_updates(self) -> None:
        pass

    def count_from(self, done: int) -> None:
        self.done.append(done)


def elastic_of(standin: Any, model: keras.Model) -> elastic.Elastic:
    return elastic.Elastic(standin, model, updates=standin, untrained=standin, counter=standin)


def recovered(standin: StandIn, losses: int) -> float:
    """Return the learning rate of a rank that notices so many losses, one after the other."""
    model = job.make_model(False)
    model.optimizer.build(model.trainable_variables)
    left = [PeerError("a rank is lost")] * losses

    def call() -> None:
        if left:
            raise left.pop()

    elastic_of(standin, model).section(call)
    return float(model.optimizer.learning_rate)


def test_the_rate_of_a_loss_scale_optimizer_is_scaled(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the rate of the optimizer around it is not used."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    session: Any = SimpleNamespace(settings=Settings(lr_scaling="linear"), world=SimpleNamespace(rank=0))
    scale_learning_rate(session, optimizer, 4, 2, [keras.callbacks.LearningRateScheduler(lambda epoch: 0.5)])
    assert float(optimizer.learning_rate) == 0.25
    assert "until callback LearningRateScheduler sets the learning rate" in caplog.text


def test_learning_rates_stay_equal_if_a_second_loss_meets_ranks_at_different_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank has recovered from the first loss, and one has not."""
    told: list[Resize] = []
    monkeypatch.setattr("hvpipe.keras.resize._hooks", [told.append])
    ahead = recovered(StandIn([[{}, {}], [{"scaled": (4,)}]]), losses=2)
    assert [(change.old_size, change.size, change.lost) for change in told] == [(4, 3, (1,)), (3, 2, (1,))]
    told.clear()
    behind = recovered(StandIn([None, [{"scaled": (4, 3)}]]), losses=1)
    assert [(change.old_size, change.size, change.lost) for change in told] == [(4, 2, (1, 2))]
    assert ahead == behind == pytest.approx(0.025)


def test_an_update_that_waits_is_not_taken_for_done_after_a_second_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the first attempt forgets what is under way, and the second saw that nothing waits."""
    monkeypatch.setattr(elastic, "broadcast_variables", lambda variables, root: None)
    standin = StandIn([None, [{"version": 0}]])
    standin.waits = True
    model = job.make_model(False)
    model.optimizer.build(model.trainable_variables)

    def flush() -> None:
        raise PeerError("a rank is lost")

    elastic_of(standin, model)
    standin.run_flush(flush)
    assert standin.versions == [-1, -1]


def test_a_step_that_comes_from_another_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with --verify, ranks compared weights at different steps from then on."""
    monkeypatch.setattr(elastic, "broadcast_variables", lambda variables, root: None)
    standin = StandIn([[{}, {"version": 1, "scaled": (4,)}]])
    recovered(standin, losses=1)
    assert standin.done == [1]


def test_without_ulfm_elastic_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import hvpipe\nhvpipe.init()\n")
    command = [word for word in (*HVPIPE, "-np", "2", str(script)) if word != "--elastic"]
    result = run(command, limit_s=LIMIT_S, env={"HVPIPE_ELASTIC": "1"})
    assert result.returncode != 0
    assert "mpirun --with-ft ulfm" in result.output, result.describe()
    assert "--restarts" in result.output
