"""Shapes of the gradients of real models, for benchmarks."""

from __future__ import annotations

Shape = tuple[int, ...]


def resnet50(classes: int = 1000) -> list[Shape]:
    """Return the 161 shapes of ResNet-50, first layer first: 25.6 million numbers.

    Convolutions without bias, each followed by scale and shift of its batch normalisation.

    Source: K. He, X. Zhang, S. Ren, J. Sun, "Deep residual learning for image recognition", CVPR
    2016, table 1, 50-layer.
    """
    shapes: list[Shape] = []

    def convolution(out: int, into: int, side: int) -> None:
        shapes.extend([(out, into, side, side), (out,), (out,)])

    convolution(64, 3, 7)
    into = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(width, into, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:  # the shortcut changes the width, too
                convolution(4 * width, into, 1)
            into = 4 * width
    return [*shapes, (classes, into), (classes,)]


def small(count: int = 200, size: int = 500) -> list[Shape]:
    """Return many shapes of few numbers, as biases and scales are: what a call costs counts."""
    return [(size,)] * count
