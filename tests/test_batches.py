"""Data are read once, copied, checked and cut; what is not one data set is refused."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from curvlab.batches import Batches, freeze, read, require_finite, rows, sample_count, tensors
from curvlab.refusals import Refusal, Trap


@dataclass(frozen=True)
class Samples:
    inputs: torch.Tensor
    targets: torch.Tensor


Pair = namedtuple("Pair", ["inputs", "labels"])


def data(n=10):
    return torch.arange(n, dtype=torch.float32)[:, None].repeat(1, 3), torch.arange(n) % 4


def whole(batches):
    parts = [tensors(piece) for piece in batches.pieces(None)]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        lambda x, y: Samples(x, y),
        lambda x, y: {"input_ids": x, "labels": y},
        lambda x, y: Pair(x, y),
        lambda x, y: [(x[:3], y[:3]), (x[3:], y[3:])],
        lambda x, y: [Samples(x[:3], y[:3]), Samples(x[3:], y[3:])],
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=3),
        lambda x, y: ((x,), y),
        lambda x, y: ({"a": x, "b": None, "c": 2.0}, y),
    ],
    ids=["tuple", "list pair", "samples", "dict", "namedtuple", "list", "list of samples", "loader",
         "nested", "mixed"],
)  # fmt: skip
def test_every_form_of_data_holds_the_same_samples_in_order(form):
    x, y = data()
    frozen = read(form(x, y))
    assert frozen.samples == 10
    for got, expected in zip(whole(frozen), (x, y), strict=True):
        assert torch.equal(got, expected)


def test_the_form_of_a_batch_is_kept():
    x, y = data()
    (batch,) = read(Pair(x, y)).pieces(None)
    assert isinstance(batch, Pair)
    (batch,) = read({"input_ids": x, "labels": y}).pieces(None)
    assert list(batch) == ["input_ids", "labels"]


def test_batches_are_joined_and_cut_evenly_but_remember_their_boundaries():
    x, y = data(10)
    frozen = read(DataLoader(TensorDataset(x, y), batch_size=4))
    assert len(frozen.joined) == 1
    assert [sample_count(piece) for piece in frozen.pieces(None)] == [4, 4, 2]
    assert [sample_count(piece) for piece in frozen.pieces(4)] == [3, 3, 4]
    assert [sample_count(piece) for piece in frozen.pieces(100)] == [10]
    assert len(list(frozen)) == len(frozen) == 3


def test_batches_of_different_shapes_are_not_joined():
    batches = [{"ids": torch.zeros(2, 5)}, {"ids": torch.zeros(3, 5)}, {"ids": torch.zeros(2, 7)}]
    frozen = read(batches)
    assert frozen.sizes == ((2, 3), (2,))
    assert [len(piece["ids"]) for piece in frozen.pieces(None)] == [2, 3, 2]


def test_what_cannot_be_cut_stays_whole():
    recurrent = (torch.zeros(7, 4, 3), torch.zeros(4))  # time first: no common first dimension
    frozen = read(recurrent)
    assert frozen.samples is None
    assert sample_count(frozen.pieces(2)[0]) is None
    assert sample_count((torch.zeros(3), object())) is None


def test_the_data_are_copied():
    x, y = data()
    frozen = read((x, y))
    x.zero_()
    assert float(whole(frozen)[0].sum()) > 0


def test_frozen_data_are_passed_through():
    frozen = freeze(data())
    assert read(frozen) is frozen
    assert freeze(frozen) is frozen
    assert isinstance(frozen, Batches)


def test_a_shuffling_loader_is_read_in_the_order_of_its_data_set_and_that_is_said(caplog):
    source = TensorDataset(*data())
    caplog.set_level("INFO", "curvlab")
    for loader in (
        DataLoader(source, batch_size=3, shuffle=True),
        DataLoader(source, batch_size=5, shuffle=True, drop_last=True),  # drops nothing
        DataLoader(source, batch_sampler=BatchSampler(RandomSampler(source), 4, False)),
        DataLoader(source, batch_size=3, sampler=SubsetRandomSampler(range(10))),
        DataLoader(source, batch_size=3, shuffle=True, num_workers=1),
    ):
        caplog.clear()
        taken = read(loader)
        assert torch.equal(whole(taken)[0], data()[0])
        assert "own order" in taken.taken
        assert "own order" in caplog.text
    some = read(DataLoader(source, batch_size=3, sampler=SubsetRandomSampler([7, 2, 5])))
    assert whole(some)[0][:, 0].tolist() == [7, 2, 5]
    single = read(DataLoader(source, batch_size=None, shuffle=True), bare=True)
    assert len(single) == 10
    assert read(DataLoader(source, batch_size=3)).taken == "as given"


class Noisy(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.randn(2), torch.tensor(0)


class Doubling(DataLoader):
    def __iter__(self):
        return ((2 * x, y) for x, y in super().__iter__())


def test_loaders_that_give_other_samples_each_time_are_refused_unless_frozen():
    source = TensorDataset(*data())
    shuffled = DataLoader(source, batch_size=3, shuffle=True)
    changing = {
        "augment": DataLoader(Noisy(), batch_size=5, shuffle=True),
        "drop_last=False": DataLoader(source, batch_size=3, shuffle=True, drop_last=True),
        "WeightedRandomSampler": DataLoader(
            source, sampler=WeightedRandomSampler(torch.ones(10), 10)
        ),
        "other samples": DataLoader(source, sampler=RandomSampler(source, num_samples=4)),
        "RandomSampler": Doubling(source, batch_size=3, shuffle=True),
    }
    for words, loader in changing.items():
        with pytest.raises(Refusal, match=rf"{words}.*curvlab\.freeze") as refused:
            read(loader)
        assert refused.value.trap is Trap.CHANGING_DATA
        assert freeze(loader).taken == "one pass, kept"
    with pytest.raises(Refusal, match="which samples share a batch"):
        read(shuffled, together=True)
    frozen = freeze(shuffled)
    assert sorted(whole(frozen)[0][:, 0].tolist()) == list(range(10))
    assert torch.equal(whole(frozen)[0], whole(frozen)[0])


class Augmented(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.full((2,), float(i)) + torch.randn(2), i


def test_an_augmenting_loader_is_refused_unless_frozen():
    loader = DataLoader(Augmented(), batch_size=2)
    with pytest.raises(ValueError, match=r"batch 0 .*augments.*freeze"):
        read(loader)
    assert freeze(loader).samples == 6


class Growing:
    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return iter([data(4)] * self.passes)


def test_a_source_that_changes_length_is_refused():
    with pytest.raises(ValueError, match="read again"):
        read(Growing())


def test_a_generator_is_refused():
    with pytest.raises(TypeError, match="only once"):
        read(batch for batch in [data()])
    with pytest.raises(TypeError, match="only once"):
        read(iter([data()]))


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ([], ValueError, "empty"),
        ((torch.zeros(0, 3), torch.zeros(0)), ValueError, "batch 0 .*no samples"),
        (torch.zeros(3, 2), TypeError, "without targets"),
        (3, TypeError, "must be a batch"),
        ("abc.pt", TypeError, "must be a batch"),
    ],
    ids=["empty list", "empty batch", "tensor", "number", "string"],
)
def test_what_is_not_data_is_refused_with_advice(bad, error, match):
    with pytest.raises(error, match=match):
        read(bad)


def test_a_dataset_of_single_samples_is_refused():
    class Bare(Dataset):
        def __getitem__(self, i):
            return i

    with pytest.raises(TypeError, match="DataLoader"):
        read(Bare())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_data_that_are_not_finite_are_refused_by_batch(poison):
    x, y = data()
    x[7, 1] = poison
    with pytest.raises(ValueError, match="batch 2 of data="):
        require_finite(read(DataLoader(TensorDataset(x, y), batch_size=3)))


def test_reading_a_loader_leaves_the_global_generator_alone():
    loader = DataLoader(TensorDataset(*data()), batch_size=3)
    before = torch.get_rng_state()
    read(loader)
    freeze(DataLoader(TensorDataset(*data()), shuffle=True))
    assert torch.equal(before, torch.get_rng_state())


def test_a_bare_tensor_is_a_batch_only_for_an_objective():
    frozen = read([torch.zeros(2, 3), torch.ones(2, 3)], bare=True)
    assert len(frozen) == 2
    assert frozen.samples == 4


def test_rows_picks_samples_and_leaves_scalars():
    batch = {"x": torch.arange(6), "t": torch.tensor(2.0), "k": 3}
    picked = rows(batch, torch.tensor([0, 5]))
    assert picked["x"].tolist() == [0, 5]
    assert picked["t"].item() == 2.0
    assert picked["k"] == 3
    assert rows(batch, slice(1, 3))["x"].data_ptr() == batch["x"][1:].data_ptr()


def test_moving_converts_floats_and_leaves_integers():
    frozen = read(data()).to(torch.device("cpu"), torch.float64)
    x, y = tensors(frozen.joined[0])
    assert x.dtype == torch.float64
    assert y.dtype == torch.int64
