"""The data of trainings by epochs: images, texts and tables that need no download."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHARACTERS = 128  # ASCII; others become 0
TEXT_LENGTH = 64
FEATURES, CLASSES = 64, 8  # of the table
_TEXTS, _ROWS = 3072, 4096
_HELD_OUT = 0.2
Arrays = tuple[Any, Any]


@dataclass(frozen=True)
class Dataset:
    """Examples and their targets, of which the first `trained` are for training after a shuffle."""

    load: Callable[[], Arrays]
    trained: int

    def split(self, seed: int) -> tuple[Any, Any, Any, Any]:
        """Return examples and targets to train on, then those held out."""
        import numpy as np

        x, y = self.load()
        order = np.random.default_rng(seed).permutation(len(x))
        train, test = order[: self.trained], order[self.trained :]
        return x[train], y[train], x[test], y[test]


def _digits() -> Arrays:
    """Return scikit-learn's 1,797 images of 8 x 8, pixels 0 to 1, and their digits."""
    import numpy as np
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1), labels.astype(np.int32)


def _prose() -> Arrays:
    """Return pieces of Python's manual, and the same one character on. Python comes with it."""
    from pydoc_data.topics import topics

    import numpy as np

    manual = "".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    characters = np.frombuffer(manual, np.uint8)[: _TEXTS * TEXT_LENGTH + 1].astype(np.int32)
    shape = (_TEXTS, TEXT_LENGTH)
    return characters[:-1].reshape(shape), characters[1:].reshape(shape)


def _table() -> Arrays:
    """Return rows of 64 numbers in eight classes of two clusters each, drawn by scikit-learn."""
    import numpy as np
    from sklearn.datasets import make_classification

    x, y = make_classification(
        _ROWS, FEATURES, n_informative=24, n_redundant=8, n_classes=CLASSES, flip_y=0.0, random_state=0
    )
    return x.astype(np.float32), y.astype(np.int32)


def _trained(examples: int) -> int:
    return int(examples * (1 - _HELD_OUT))


DATASETS = {
    "digits": Dataset(_digits, _trained(1797)),
    "prose": Dataset(_prose, _trained(_TEXTS)),
    "table": Dataset(_table, _trained(_ROWS)),
}
