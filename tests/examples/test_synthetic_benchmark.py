"""examples/synthetic_benchmark.py prints the lines of Horovod's synthetic benchmark."""

from __future__ import annotations

from pathlib import Path

from distributed import ALONE, launch

SCRIPT = Path(__file__).parents[2] / "examples" / "synthetic_benchmark.py"
SMALL = ("--model", "MobileNet", "--batch-size", "2", "--image-size", "32", "--num-warmup-batches", "1")


def test_the_lines_of_a_benchmark_on_two_ranks() -> None:
    numbers = ("--num-batches-per-iter", "1", "--num-iters", "2", "--fp16-allreduce", "--no-cuda")
    result = launch(2, [SCRIPT, *SMALL, *numbers], limit_s=300.0)
    assert result.returncode == 0, result.describe()
    starts = [line.split(": ")[0] for line in result.output.splitlines() if "img/sec" in line.lower()]
    assert starts == ["Iter #0", "Iter #1", "Img/sec per CPU", "Total img/sec on 2 CPU(s)"], result.describe()
    assert "AutoGraph" not in result.output, result.describe()


def test_a_model_that_does_not_exist() -> None:
    result = launch(ALONE, [SCRIPT, "--model", "ResNet51"], limit_s=300.0)
    assert result.returncode != 0
    assert "a model of keras.applications. Received: ResNet51" in result.output
