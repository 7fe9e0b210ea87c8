"""The report: one page that says what agrees with the paper, made from the results alone.

``write`` needs no data, no runs and no training: tables, claims and figures are functions of the
metrics in ``results.jsonl``. The page holds its style and figures in itself and asks nothing of a
network; the same figures (PNG, PDF) and a CSV file per table lie beside it. Equal results give an
equal page: it shows the dates of the results, not its own.
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.experiment import Experiment
from experiments.findings import findings_of
from experiments.page import page
from experiments.registry import EXPERIMENTS
from experiments.store import Store


def write(store: Store, out: Path, experiments: Sequence[Experiment] = EXPERIMENTS) -> Path:
    """Make ``index.html``, ``figures/`` and ``tables/`` in ``out`` from the results in ``store``.

    Of several sizes of a label the largest is shown and the others are folded below it.
    """
    findings = {experiment.label: findings_of(store, experiment) for experiment in experiments}
    for folder in ("figures", "tables"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    pictures: dict[str, bytes] = {}
    for experiment in experiments:
        for found in findings[experiment.label]:
            for name, table in found.files():
                (out / "tables" / f"{name}.csv").write_text(table.to_csv(), encoding="utf-8")
            if experiment.figure is not None:
                path = out / "figures" / found.anchor
                experiment.figure(experiment.sizes[found.size], found.metrics, path)
                pictures[found.anchor] = path.with_name(f"{path.name}.png").read_bytes()
    path = out / "index.html"
    path.write_text(page(experiments, findings, pictures, store.results()), encoding="utf-8")
    return path
