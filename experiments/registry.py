"""Every experiment, in the order of the paper; a new module is added here."""

from difflib import get_close_matches

from experiments.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = ()


def find(label: str) -> Experiment:
    """The experiment that answers ``label``."""
    by_label = {name: one for one in EXPERIMENTS for name in one.labels}
    if label in by_label:
        return by_label[label]
    lower = {name.lower(): name for name in by_label}
    near = get_close_matches(label.lower(), lower, n=1, cutoff=0.4)
    hint = f" Did you mean {lower[near[0]]!r}?" if near else ""
    raise ValueError(
        f"no experiment answers {label!r}.{hint} `python -m experiments list` shows all labels"
    )
