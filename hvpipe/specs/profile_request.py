"""The request that `hvpipe profile` passes to its ranks as text on their command line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hvpipe.errors import HvpipeError


@dataclass(frozen=True)
class InputShape:
    """The shape of one sample of the input `name`; an empty name stands for the model's only input."""

    name: str
    axes: tuple[int, ...]


@dataclass(frozen=True)
class ProfileTask:
    """The function to profile, its options, and the paths of the results.

    `target` is FILE.py:FUNCTION or MODULE:FUNCTION; paths are absolute. `microbatch` is the number of
    samples; with None, the function returns a micro-batch. `optimizer` is the name of a Keras optimizer.
    """

    target: str
    profile_path: str
    cluster_path: str
    microbatch: int | None = None
    input_shapes: tuple[InputShape, ...] = ()
    repeats: int = 5
    optimizer: str | None = None

    def __post_init__(self) -> None:
        place, colon, function = self.target.rpartition(":")
        if not colon or not place or not function.isidentifier():
            raise HvpipeError(
                "The model should be given as FILE.py:FUNCTION or MODULE:FUNCTION, where the function "
                f"returns it and takes no arguments. Received: {self.target!r}"
            )
        for name, number in (("--microbatch", self.microbatch), ("--repeats", self.repeats)):
            if number is not None and number < 1:
                raise HvpipeError(f"{name} should be at least 1. Received: {name} {number}")

    @property
    def place(self) -> str:
        """The file or the module of `target`."""
        return self.target.rpartition(":")[0]

    @property
    def function(self) -> str:
        return self.target.rpartition(":")[2]

    @property
    def is_file(self) -> bool:
        return self.place.endswith(".py")

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> ProfileTask:
        """Return the task that `to_text` wrote."""
        fields = json.loads(text)
        shapes = (InputShape(row["name"], tuple(row["axes"])) for row in fields.pop("input_shapes"))
        return ProfileTask(**fields, input_shapes=tuple(shapes))


def parse_input_shapes(texts: Sequence[str]) -> tuple[InputShape, ...]:
    """Parse "224,224,3" or "image=224,224,3", one text for each input."""
    shapes = []
    for text in texts:
        name, equals, axes = text.rpartition("=")
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", axes) or (equals and not name):
            raise HvpipeError(
                "--input-shape should list the axes of one sample: 224,224,3, or image=224,224,3 for the "
                f"input `image`. Received: --input-shape {text!r}"
            )
        shapes.append(InputShape(name, tuple(map(int, axes.split(",")))))
    names = [shape.name for shape in shapes]
    if len(set(names)) < len(names) or (len(names) > 1 and "" in names):
        raise HvpipeError(
            "--input-shape should be given once for each input, with its name if there are several. "
            f"Received: --input-shape {' --input-shape '.join(texts)}"
        )
    return tuple(shapes)
