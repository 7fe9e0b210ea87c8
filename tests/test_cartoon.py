"""The toy picture: the network forgets each task for the next, yet one network can hold all."""

import json

from experiments.cartoon import EXPERIMENT, Config
from experiments.shelf import Shelf
from experiments.store import Store


def test_the_network_forgets_each_task_for_the_next_and_the_picture_needs_numbers_alone(tmp_path):
    config = Config(epochs=8, grid=21)
    measured = EXPERIMENT.run(config, [11], Shelf(Store(tmp_path)))
    # as the results file gives them back: with keys in alphabetical order
    metrics = {seed: json.loads(json.dumps(one, sort_keys=True)) for seed, one in measured.items()}
    found = metrics[11]["accuracy"]
    assert found["after centre"]["centre"] > 0.95
    assert found["after bottom left"]["bottom left"] > 0.95
    assert found["after top right"]["top right"] > 0.95
    assert found["after top right"]["centre"] < 0.8
    assert min(found["all together"].values()) > 0.9
    assert [
        claim.verdict
        for claim in EXPERIMENT.claims(config, metrics, EXPERIMENT.tables(config, metrics))
    ] == ["agree"] * 4
    [table] = EXPERIMENT.tables(config, metrics)
    assert table.columns == ("centre", "bottom left", "top right")
    assert list(table.rows) == [*(f"after {name}" for name in table.columns), "all together"]
    EXPERIMENT.figure(config, metrics, tmp_path / "cartoon")
    picture = (tmp_path / "cartoon.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    assert (tmp_path / "cartoon.pdf").stat().st_size > 5_000
