"""Kills, interrupts, full disks and damaged files, a few of each; `python -m tests.reliability`
makes the whole table."""

import pytest

from curvlab.storage import StorageError, load_tensors, read_manifest, save_tensors
from tests.reliability.loaders import READERS, fuzz
from tests.reliability.strikes import strikes, unharmed
from tests.reliability.subjects import SUBJECTS

KINDS = ("kill", "interrupt", "full disk")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_work_that_is_struck_down_goes_on_to_the_same_bits(name, kind, tmp_path):
    # how often a random moment hits depends on the machine: what must hold is that none harms
    assert unharmed(found := strikes(kind, SUBJECTS[name], 1, tmp_path)), found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "count"), [("kill", 30), ("interrupt", 200), ("full disk", 30)])
@pytest.mark.parametrize("name", SUBJECTS)
def test_work_that_is_struck_down_often_goes_on_to_the_same_bits(name, kind, count, tmp_path):
    assert unharmed(found := strikes(kind, SUBJECTS[name], count, tmp_path, seed=1)), found


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_refused_by_name_or_read_right(name, tmp_path):
    found = fuzz(READERS[name], tmp_path, 40)
    assert set(found) <= {"said", "right"}, found
    assert found["said"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_many_damaged_files_are_refused_by_name_or_read_right(name, tmp_path):
    found = fuzz(READERS[name], tmp_path, 500, seed=1)
    assert set(found) <= {"said", "right"}, found


@pytest.mark.parametrize("name", ["eigenpairs", "density", "basis", "eigensolve's checkpoint"])
def test_a_file_with_nan_in_it_is_refused_by_name_though_its_checksum_fits(name, tmp_path):
    reader = READERS[name]
    path = reader.make(tmp_path)
    manifest = read_manifest(path)
    tensors, _ = load_tensors(path, manifest["kind"])
    for broken in [n for n, t in tensors.items() if t.is_floating_point() and t.numel()]:
        holed = {n: t.clone() for n, t in tensors.items()}
        holed[broken].view(-1)[-1] = float("nan")
        save_tensors(path, manifest["kind"], holed, manifest)
        with pytest.raises(StorageError, match=rf"{path.name}.*(NaN|not positive definite)"):
            reader.read(path)
