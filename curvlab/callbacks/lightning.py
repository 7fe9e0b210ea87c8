"""Curvature in Lightning: ``Trainer(callbacks=[CurvatureCallback(Watch(...))])``.

Figures go through ``pl_module.log_dict``, and so to whatever logger the Trainer has.
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from curvlab.callbacks import Watch


class CurvatureCallback(Callback):  # type: ignore[misc]
    """Measures after every step whose turn it is."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        """After an optimizer step; batches of one accumulated step are measured once."""
        if self.watch.tracker.steps[-1:] != [trainer.global_step]:
            figures = self.watch.at(trainer.global_step)
            if figures:
                pl_module.log_dict(figures)
