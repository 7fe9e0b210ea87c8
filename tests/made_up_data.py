"""Data sets drawn at random: arrays, images with labels, and CIFAR's files as published."""

import struct

import numpy as np
import torch

from curvlab.tasks import ImageData

CIFAR10_NAMES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def arrays(count=7, shape=(28, 28), classes=10, seed=0):
    draw = np.random.default_rng(seed)
    return (
        draw.integers(0, 256, (count, *shape), dtype=np.uint8),
        draw.integers(0, classes, count, dtype=np.int64),
    )


def pictures(count=40, channels=3, side=32, classes=10, seed=0, name="pictures"):
    """Random images; every class equally often in both parts."""
    draw = torch.Generator().manual_seed(seed)
    shape = (count, channels, side, side)
    images = torch.randint(0, 256, (2, *shape), generator=draw, dtype=torch.uint8)
    labels = torch.arange(count) % classes
    labels = labels[torch.randperm(count, generator=draw)]
    return ImageData(
        name, images[0], labels, images[1], labels.flip(0), tuple(str(c) for c in range(classes))
    )


class Python2:
    """Pickles as cPickle of Python 2 wrote them: byte strings, arrays through ``_reconstruct``."""

    def text(self, value: bytes) -> bytes:
        if len(value) < 256:
            return b"U" + bytes([len(value)]) + value + b"q\x01"  # everything is memoised
        return b"T" + struct.pack("<i", len(value)) + value + b"r\x00\x01\x00\x00"

    def integer(self, value: int) -> bytes:
        return b"K" + bytes([value])

    def items(self, values) -> bytes:
        return b"](" + b"".join(values) + b"e"

    def array(self, value) -> bytes:
        dtype = b"cnumpy\ndtype\n" + self.text(b"u1") + b"K\0K\1\x87R"
        dtype += b"(K\3" + self.text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
        rows, columns = (b"M" + struct.pack("<H", size) for size in value.shape)
        made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + self.text(b"b")
        return (
            made + b"\x87R(K\1" + rows + columns + b"\x86" + dtype + b"\x89"
            + self.text(value.tobytes()) + b"tb"
        )  # fmt: skip

    def batch(self, images, labels, key=b"labels", extra=()) -> bytes:
        pairs = [
            (b"batch_label", self.text(b"training batch 1 of 5")),
            (key, self.items(self.integer(int(label)) for label in labels)),
            *extra,
            (b"data", self.array(images)),
            (b"filenames", self.items(self.text(f"{i}.png".encode()) for i in range(len(labels)))),
        ]
        body = b"".join(self.text(name) + value for name, value in pairs)
        return b"\x80\x02}(" + body + b"u."


def cifar_files(names, key=b"labels", classes=10):
    contents, truth = {}, []
    for index, name in enumerate(names):
        images, labels = arrays(4, (3072,), classes, seed=index)
        coarse = [(b"coarse_labels", Python2().items([Python2().integer(0)] * 4))]
        extra = coarse if classes == 100 else []
        contents[name] = Python2().batch(images, labels, key, extra)
        truth.append((images, labels))
    return contents, truth
