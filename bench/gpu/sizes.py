"""How much bench.gpu.check verifies and measures."""

from __future__ import annotations

from dataclasses import dataclass


def _resnet50() -> list[int]:
    """Return the elements of ResNet-50's 214 gradients (He et al. 2015), 25.6 million as in
    keras.applications.
    """
    counts = [7 * 7 * 3 * 64, 64, 64, 64]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            kernels = [before * width, 9 * width * width, width * 4 * width]
            if block == 0:
                kernels.insert(0, before * 4 * width)
            widths = [*([4 * width] if block == 0 else []), width, width, 4 * width]
            for kernel, out in zip(kernels, widths, strict=True):
                counts += [kernel, out, out, out]  # with a bias, and the scale and offset of a normalization
            before = 4 * width
    return [*counts, 2048 * 1000, 1000]


RESNET50 = tuple(_resnet50())


@dataclass(frozen=True)
class Sizes:
    """How much is verified and measured: elements, megabytes (10^6 bytes), rounds, seconds."""

    counts: tuple[int, ...] = (1, 7, 4096, 1_000_003)
    largest: int = 1_000_000  # large enough that NCCL's own memory is used
    megabytes: tuple[int, ...] = (4, 16, 64, 256)
    gradients: tuple[int, ...] = RESNET50
    overlapped_megabytes: int = 64
    rounds: int = 11
    sampled_s: float = 10.0  # in 5 s, one look more or less decides whether the sampler is cheap enough
    judged: bool = True  # whether figures are compared with what is wanted


SMALL = Sizes((1, 7, 4097), 20_000, (1,), RESNET50[:24], 1, 3, 1.0, judged=False)
