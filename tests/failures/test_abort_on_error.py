"""The line that tells why a rank ends all others."""

from __future__ import annotations

import pytest

from hvpipe.failures.abort_on_error import in_one_line

OF_TENSORFLOW = """Graph execution error:

Detected at node step/SparseSoftmaxCrossEntropyWithLogits defined at (most recent call last):
<stack traces unavailable>
Received a label value of 7 which is outside the valid range of [0, 3).
\t [[{{node step}}]] [Op:__inference_step_12]"""
OF_KERAS = """Exception encountered when calling PipelineParallel.call().

\x1b[1mA pipeline has no call of the whole model.\x1b[0m

Arguments received by PipelineParallel.call():
  • args=<class 'inspect._empty'>"""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no such layer."), "ValueError: no such layer"),
        (KeyError("loss"), "KeyError: 'loss'"),
        (RuntimeError(), "RuntimeError"),
        (OSError("one\ntwo"), "OSError: one"),
        (ValueError("<Foo> should be built"), "ValueError: <Foo> should be built"),
        (ValueError("{'a': 1} is no list"), "ValueError: {'a': 1} is no list"),
        (
            RuntimeError("{{function_node __wrapped__MatMul}} Sizes differ [Op:MatMul]"),
            "RuntimeError: Sizes differ [Op:MatMul]",
        ),
        (
            RuntimeError(OF_TENSORFLOW),
            "RuntimeError: Graph execution error: Received a label value of 7 which is outside the valid "
            "range of [0, 3)",
        ),
        (
            ValueError(OF_KERAS),
            "ValueError: Exception encountered when calling PipelineParallel.call(). A pipeline has no call "
            "of the whole model",
        ),
        (
            RuntimeError("3 objects, such as:\n\nDense has none"),
            "RuntimeError: 3 objects, such as: Dense has none",
        ),
    ],
)
def test_the_line_says_what_is_wrong(error: Exception, line: str) -> None:
    assert in_one_line(error) == line
