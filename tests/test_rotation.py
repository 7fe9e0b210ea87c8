"""Rotation and shrinking against independent truth: quarter turns, grid_sample, Pillow."""

import numpy as np
import pytest
import torch
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample

from curvlab.tasks import (
    embedded_mnist,
)
from curvlab.tasks.rotation import resampling_matrix, rotated
from tests.made_up_data import pictures

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


@pytest.mark.parametrize("size", [1, 2, 7, 14, 28])
@pytest.mark.parametrize("turns", [-2, -1, 0, 1, 2, 3, 4])
def test_quarter_turns_are_exact_and_counter_clockwise(size, turns):
    image = torch.arange(size * size, dtype=torch.float64).view(size, size)
    turned = resampling_matrix(size, size, 90.0 * turns) @ image.flatten()
    assert torch.equal(turned.view(size, size), torch.rot90(image, turns))


@pytest.mark.parametrize("degrees", [-45.0, -22.5, 0.0, 13.7, 22.5, 45.0, 170.0, 400.0])
@pytest.mark.parametrize(("size", "side"), [(28, 14), (14, 14), (28, 28), (9, 3), (12, 1)])
def test_rotation_then_shrinking_agrees_with_grid_sample_and_pooling(size, side, degrees):
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(3, 1, size, size, generator=draw, dtype=torch.float64)
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    rows = torch.stack([torch.cos(angle), -torch.sin(angle), torch.sin(angle), torch.cos(angle)])
    theta = torch.cat([rows.view(2, 2), torch.zeros(2, 1, dtype=torch.float64)], dim=1)
    grid = affine_grid(theta.expand(3, 2, 3), list(images.shape), align_corners=False)
    turned = grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    expected = avg_pool2d(turned, size // side).flatten(1)
    result = images.flatten(1) @ resampling_matrix(size, side, degrees).T
    assert (result - expected).abs().max() < TOLERANCE[torch.float64]


def test_rotation_agrees_with_pillow_to_its_rounding():
    image_module = pytest.importorskip("PIL.Image")
    digit = embedded_mnist().train_images[17, 0]
    [turned] = rotated(digit.view(1, 1, 14, 14), [22.5], 14)
    expected = np.asarray(
        image_module.fromarray(digit.numpy()).rotate(22.5, image_module.Resampling.BILINEAR)
    )
    inside = slice(2, -2)  # Pillow blends differently where the image ends
    difference = turned.view(14, 14) * 255 - torch.from_numpy(expected.astype(np.float32))
    assert difference[inside, inside].abs().max() <= 1.0


def test_many_images_are_rotated_as_each_alone(monkeypatch):
    monkeypatch.setattr("curvlab.tasks.rotation.CHUNK", 4)
    images = pictures(9, channels=1, side=6, classes=3).train_images
    together = rotated(images, [10.0, -30.0], 3)
    assert together.shape == (2, 9, 9)
    assert together.dtype == torch.float32
    for index in range(9):
        alone = rotated(images[index : index + 1], [-30.0], 3)[0, 0]
        assert (together[1, index] - alone).abs().max() < TOLERANCE[torch.float32]
