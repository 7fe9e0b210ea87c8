"""What curvlab refuses to differentiate: which trap it is, and the cure.

The message of a refusal is for the reader; programs ask for its :class:`Trap`.
"""

from enum import Enum


class Trap(Enum):
    """What stands in the way, by the name that the doctor gives it; ``cure`` says what helps."""

    CHANGING_DATA = (
        "changing data",
        "no augmentation, sampling with replacement or dropped samples; or curvlab.freeze(loader) "
        "to take one pass as the data",
    )
    UNUSABLE_DATA = (
        "unusable data",
        "pass (inputs, targets), a list of batches, a dict or a DataLoader",
    )
    RANDOM = (
        "random loss",
        'make the layer respect self.training, or mode="frozen-masks", which draws the '
        "same numbers every time",
    )
    NOT_ADDITIVE = (
        "loss that does not add up",
        'count= (what a batch\'s mean divides by), a loss with reduction="sum", or chunk="batch"',
    )
    COUPLED = ("coupled samples", 'chunk="batch": batches are then never cut')
    NO_DEPENDENCE = (
        "no dependence",
        "select= other parameters; look for .detach(), .data or torch.no_grad() in forward",
    )
    NOT_SCALAR = ("loss is not a scalar", 'reduction="mean" or "sum" in the loss')
    NOT_FINITE = ("loss is not finite", "look at these samples and the learning rate")
    LINEAR_LOSS = (
        "loss is linear in the outputs",
        "return logits in place of log-probabilities, and pass cross_entropy",
    )
    ONCE_ONLY = (
        "no second derivative",
        "write the layer with others (EmbeddingBag as Embedding and a mean)",
    )
    REENTRANT = ("reentrant checkpoint", "use_reentrant=False, or no activation checkpoints")
    ESTIMATOR = (
        "wrong first derivative",
        "replace the layer; check=False takes derivatives through a straight-through estimator",
    )
    DERIVATIVE = (
        "wrong second derivative",
        "replace the layer: torch operations in place of a custom autograd.Function",
    )

    def __init__(self, title: str, cure: str) -> None:
        self.title, self.cure = title, cure


class Refusal(ValueError):
    """There is no curvature of this, or not one; ``trap`` is why."""

    def __init__(self, message: str, trap: Trap) -> None:
        super().__init__(message)
        self.trap = trap

    def __reduce__(self) -> tuple[type["Refusal"], tuple[str, Trap]]:
        return type(self), (str(self), self.trap)
