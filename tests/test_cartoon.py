"""The toy picture: the network forgets each task for the next, yet one network can hold all."""

import json

import torch

from experiments.cartoon import Config, main


def test_the_command_leaves_a_picture_and_numbers_that_show_forgetting(tmp_path, capsys):
    torch.set_num_threads(1)  # the steps are far too small to share
    main(["--out", str(tmp_path)], Config(epochs=8))
    found = json.loads((tmp_path / "cartoon.json").read_text())
    assert found["after centre"]["centre"] > 0.95
    assert found["after bottom left"]["bottom left"] > 0.95
    assert found["after top right"]["top right"] > 0.95
    assert found["after top right"]["centre"] < 0.8
    assert min(found["all together"].values()) > 0.9
    picture = (tmp_path / "cartoon.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    assert "cartoon.png" in capsys.readouterr().out
