"""Saved results say what they are, where they came from, and survive only whole."""

import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

from curvlab import (
    Basis,
    Density,
    Eigenpairs,
    Hessian,
    Run,
    StorageError,
    lanczos,
    spectral_density,
)
from curvlab.learners import SGD
from curvlab.nets import mlp
from curvlab.storage import command, read_manifest
from curvlab.tasks import limit, rotated_mnist
from curvlab.training import Schedule, learn

INPUTS = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
DATA = INPUTS, torch.arange(9) % 3


def operator():
    return Hessian(mlp((5, 4, 3), seed=0), cross_entropy, DATA)


def results():
    H = operator()
    pairs = lanczos(H, 3, progress=False)
    basis = Basis(H.n, 4)
    basis.extend(pairs.vectors, task="first")
    tasks = limit(rotated_mnist(angles=[0.0]), train=20, test=20)
    (run,) = learn(lambda seed: mlp(seed=seed), tasks, SGD(), Schedule(lr=0.01), seeds=1)
    return {
        "eigenpairs": pairs,
        "basis": basis,
        "density": spectral_density(H, probes=2, steps=5),
        "run": run,
    }


KINDS = {"eigenpairs": Eigenpairs, "basis": Basis, "density": Density, "run": Run}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    about = operator().about()
    return {
        kind: result.save(folder / f"{kind}.safetensors", {**about, "note": kind})
        for kind, result in results().items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_tells_kind_versions_command_settings_and_digests(kind, saved):
    manifest = read_manifest(saved[kind])
    assert manifest["kind"] == kind
    assert manifest["torch"] == str(torch.__version__)
    assert manifest["command"] == command()
    assert manifest["about"]["note"] == kind
    assert manifest["about"]["operator"] == "Hessian"
    assert len(manifest["about"]["data"]) == 16


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_comes_back_and_a_changed_byte_is_noticed(kind, saved, tmp_path):
    KINDS[kind].load(saved[kind])
    content = bytearray(saved[kind].read_bytes())
    content[-5] ^= 1
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(content)
    with pytest.raises(StorageError, match="checksum"):
        KINDS[kind].load(damaged)


def test_digests_follow_parameters_and_data():
    first = operator().about()
    assert first == operator().about()
    other = Hessian(mlp((5, 4, 3), seed=1), cross_entropy, DATA).about()
    assert other["parameters"] != first["parameters"]
    assert other["data"] == first["data"]
    moved = Hessian(mlp((5, 4, 3), seed=0), cross_entropy, (INPUTS + 1, DATA[1])).about()
    assert moved["parameters"] == first["parameters"]
    assert moved["data"] != first["data"]


def test_a_run_knows_its_data(saved):
    assert len(Run.load(saved["run"]).config["data"]) == 16


def test_other_files_are_told_apart(tmp_path):
    with pytest.raises(StorageError, match="does not exist"):
        read_manifest(tmp_path / "absent")
    with pytest.raises(FileNotFoundError):
        Eigenpairs.load(tmp_path / "absent")
    text = tmp_path / "text"
    text.write_text("hello, this is no tensor file at all")
    with pytest.raises(StorageError, match="not a safetensors file"):
        read_manifest(text)
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(StorageError, match="curvlab did not write it"):
        read_manifest(tmp_path / "foreign.safetensors")


def test_the_command_is_as_it_would_be_typed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/curvlab", "eig", "--select", "head.*"])
    assert command() == "curvlab eig --select 'head.*'"


def test_a_density_goes_on_from_its_checkpoint(tmp_path):
    H, file = operator(), tmp_path / "density.partial"

    class Interrupted:
        n, dtype, device = H.n, H.dtype, H.device

        def __init__(self, most):
            self.left = most

        def __matmul__(self, vectors):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return H @ vectors

    with pytest.raises(KeyboardInterrupt):
        spectral_density(Interrupted(5 + 5 * 2 + 3), probes=4, steps=5, checkpoint=file)
    fresh = Interrupted(10**6)
    resumed = spectral_density(fresh, probes=4, steps=5, checkpoint=file)
    assert 10**6 - fresh.left == 5 + 5 * 2, "probe, identity, two vectors left"
    straight = spectral_density(Interrupted(10**6), probes=4, steps=5)
    assert torch.equal(resumed.nodes, straight.nodes)
    assert torch.equal(resumed.weights, straight.weights)
    with pytest.raises(ValueError, match="checkpoint of another density"):
        spectral_density(H, probes=3, steps=5, checkpoint=file)
