"""Finds which tensors and variables of a pipeline get a gradient; all ranks find out together.

Keras does not update a weight if no gradient reaches it. A stage sees only its own layers, so it cannot tell
whether a later stage passes a gradient back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvpipe.keras import compat
from hvpipe.keras.graph.deferred_build import variables_of
from hvpipe.keras.graph.stage import StageFunctions
from hvpipe.keras.graph.stage_cuts import Stages, Wire
from hvpipe.session import Session


@dataclass(frozen=True)
class GradientCoverage:
    """The wires without a gradient and the variables with one, over all ranks.

    Attributes:
        unreached: Wires that get no gradient, each with the stage that receives it.
        variables: The ids of the trainable variables that get a gradient in any stage.
    """

    unreached: frozenset[tuple[int, Wire]]
    variables: frozenset[int]


def find_coverage(
    session: Session, stages: Stages, functions: Mapping[int, StageFunctions]
) -> GradientCoverage:
    """Find which tensors and variables get a gradient, and apply it to this rank's `functions`; collective.

    Works from the last stages to the first. An output without a gradient from any of its users passes none to
    the tensors that it is computed from.
    """
    variables = variables_of(stages.graph.all_layers())
    numbers = {id(compat.native_value(v)): number for number, v in enumerate(variables)}
    unreached: frozenset[tuple[int, Wire]] = frozenset()
    while True:
        mine = {(stage, wire) for stage, of in functions.items() for wire in of.unreached}
        trained = {numbers[id(v)] for of in functions.values() for v in of.training.variables}
        everyone = session.engine.allgather_object((mine, trained), "start of training (which layers train)")
        found = frozenset().union(*(of_rank for of_rank, _ in everyone))
        if found == unreached:
            every = frozenset().union(*(of_rank for _, of_rank in everyone))
            reached = (v for number, v in enumerate(variables) if number in every)
            return GradientCoverage(unreached, frozenset(map(id, reached)))
        unreached = found
        apply_coverage(stages, functions, unreached)


def apply_coverage(
    stages: Stages, functions: Mapping[int, StageFunctions], unreached: frozenset[tuple[int, Wire]]
) -> None:
    """Let this rank's stages ignore the gradients of outputs whose users have none."""
    for stage, of_stage in functions.items():
        of_stage.ignore_outputs(stages.without_users(stage, unreached))
