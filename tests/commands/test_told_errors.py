"""The tracebacks of a failed job: each once, without frames of packages, and the cause last."""

from __future__ import annotations

from hvpipe.commands.told_errors import merged, shortened

OWN = '  File "/home/me/train.py", line 5, in main\n    model.fit(x)\n    ^^^^\n'
KERAS = '  File "/v/lib/python3.11/site-packages/keras/src/trainer.py", line 400, in fit\n    end()\n'
HVPIPE = '  File "/work/hvpipe/keras/instance_methods.py", line 28, in replaced\n    return stand_in()\n'
INNER = '  File "/home/me/train.py", line 22, in gen\n    raise ValueError("bad sample")\n'
BEGIN = "Traceback (most recent call last):\n"


def test_equal_tracebacks_are_merged_and_consequences_are_a_line() -> None:
    text = f"{BEGIN}{OWN}ValueError: bad\n"
    told = {rank: (f"ValueError on rank {rank}: bad", text) for rank in (1, 2, 3, 5)}
    told[0] = (
        "PeerError on rank 0: Rank 1 has left",
        f"{BEGIN}{OWN}hvpipe.errors.PeerError: Rank 1 has left\n",
    )
    told[4] = ("KeyError on rank 4: 'x'", f"{BEGIN}{OWN}KeyError: 'x'\n")
    assert merged(told) == (
        "\nhvpipe: PeerError on rank 0: Rank 1 has left\n"
        f"\nhvpipe: ranks 1, 2, 3, 5 failed:\n{text}"
        f"\nhvpipe: rank 4 failed:\n{BEGIN}{OWN}KeyError: 'x'\n"
    )
    del told[0], told[4], told[5]
    assert merged(told) == f"\nhvpipe: ranks 1-3 failed:\n{text}"
    alone = {0: ("PeerError on rank 0: lost", f"{BEGIN}{OWN}PeerError: lost\n")}
    assert "rank 0 failed:\nTraceback" in merged(alone)  # nothing else says why


def test_a_graph_execution_error_shows_the_users_frames() -> None:
    """TensorFlow puts a second traceback, with empty lines, into the text of its error."""
    script_ops = KERAS.replace("keras/src/trainer", "tensorflow/python/ops/script_ops")
    text = (
        f"{BEGIN}{OWN}{HVPIPE}{KERAS}tensorflow.errors.InvalidArgumentError: Graph execution error:\n\n"
        "Detected at node PyFunc defined at (most recent call last):\n<stack traces unavailable>\n"
        f"ValueError: bad sample\n{BEGIN}\n{script_ops}\n{INNER}\nValueError: bad sample\n\n\n"
        "\t [[{{node PyFunc}}]]\n\t [[IteratorGetNext]] [Op:__inference_multi_step_on_iterator_414]\n"
    )
    assert shortened(text) == (
        f"{BEGIN}{OWN}  ... 2 frames of hvpipe, keras (--verbose shows them)\n"
        "tensorflow.errors.InvalidArgumentError: Graph execution error:\n\n"
        f"ValueError: bad sample\n{BEGIN}\n  ... 1 frame of tensorflow (--verbose shows them)\n{INNER}\n"
        "ValueError: bad sample\n\n\n"
    )


def test_a_traceback_of_packages_alone_stays() -> None:
    text = f"{BEGIN}{HVPIPE}{KERAS}TypeError: a bug of ours\n"
    assert shortened(text) == text
