"""Curvature in transformers' Trainer: ``attach(trainer, Watch(model, None, batch, every=200))``.

Figures go where the Trainer's own go: its log history, TensorBoard, wandb, whatever reports.
"""

from typing import Any

from transformers import Trainer, TrainerCallback

from curvlab.callbacks import Watch


class CurvatureCallback(TrainerCallback):  # type: ignore[misc]
    """Measures at the beginning and after every step whose turn it is."""

    def __init__(self, watch: Watch, trainer: Trainer) -> None:
        self.watch, self.trainer = watch, trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Where training starts from."""
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After an optimizer step."""
        del args, control
        figures = self.watch.at(state.global_step)
        if figures:
            self.trainer.log(figures)


def attach(trainer: Trainer, watch: Watch) -> None:
    """Have ``trainer`` measure and report."""
    trainer.add_callback(CurvatureCallback(watch, trainer))
