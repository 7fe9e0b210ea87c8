"""The 2-D challenge of fig:cartoon_forgetting: three tasks, two classes, one network.

Task 1 lies in the centre, task 2 at the bottom left, task 3 at the top right. Each is a pair of
round clouds, turned by a third of a circle from task to task: trained on one task, a network
extends its boundary so that it cuts the others wrongly, though one network can hold all three.
"""

import math

import torch

from curvlab.checks import whole
from curvlab.tasks.samples import Samples, Task, generator_of

SPREAD = 0.18  # standard deviation of a cloud
DISTANCE = 1.0  # between the middles of a task's two clouds
# name, centre of the pair, direction from class 0 to class 1 in degrees
PLACES = (
    ("centre", (0.0, 0.0), 0.0),
    ("bottom left", (-2.0, -2.0), 120.0),
    ("top right", (2.0, 2.0), 240.0),
)


def toy_challenge(
    samples: int = 400,
    *,
    test: int = 400,
    seed: int | torch.Generator = 0,
) -> list[Task]:
    """Three tasks of points ``(N, 2)``, half of each class, in random order.

    Args:
        samples: Training points per task.
        test: Test points per task.
        seed: An int or a generator.
    """
    whole(2, samples=samples, test=test)  # one per class
    generator = generator_of(seed)

    def draw(count: int, centre: tuple[float, float], degrees: float) -> Samples:
        targets = torch.randperm(count, generator=generator, device="cpu") % 2
        angle = math.radians(degrees)
        side = (targets - 0.5).double() * DISTANCE
        points = SPREAD * torch.randn(
            count, 2, generator=generator, dtype=torch.float64, device="cpu"
        )
        points[:, 0] += centre[0] + side * math.cos(angle)
        points[:, 1] += centre[1] + side * math.sin(angle)
        return Samples(points.float(), targets)

    return [
        Task(name, draw(samples, centre, degrees), draw(test, centre, degrees), classes=2)
        for name, centre, degrees in PLACES
    ]
