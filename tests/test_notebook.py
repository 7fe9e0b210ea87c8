"""Results in a notebook and in a training loop: tables, slices of the loss, figures for loggers."""

import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import curvlab
from curvlab import Basis, GaussNewton, Hessian, lanczos, landscape, layer_spectra, spectral_density
from curvlab.callbacks import Watch, tensorboard, wandb
from curvlab.html import block, spark
from tests.foreign_models import CASES


def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(n=8):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 2, (n,), generator=generator)


def parsed(html):
    return ElementTree.fromstring(html.replace("<br>", "<br/>"))


def cells(html):
    return [cell.text or "" for cell in parsed(html).iter("td")]


# -- notebooks -------------------------------------------------------------------------------------


def test_eigenpairs_show_their_values_and_what_is_not_certain():
    pairs = lanczos(Hessian(net(), cross_entropy, batch()), k=3, progress=False)
    shown = pairs._repr_html_()
    assert f"{float(pairs.values[0]):.7g}" in cells(shown)
    assert "complete, doubt" in shown
    assert len(list(parsed(shown).iter("rect"))) == 3
    matrix = curvlab.Dense(torch.diag(torch.arange(1.0, 301.0, dtype=torch.float64)))
    hasty = lanczos(matrix, k=3, max_products=40, certify=False, progress=False, tol=1e-12)
    assert "no" in cells(hasty._repr_html_())
    assert "completeness not shown" in hasty._repr_html_()


def test_density_layers_certificate_and_basis_show_themselves():
    operator = Hessian(net(), cross_entropy, batch())
    density = spectral_density(operator, probes=2, steps=6, progress=False)
    assert str(density.moment(1)) in cells(density._repr_html_())
    layers = layer_spectra(operator, k=1, progress=False)
    assert {"0", "2"} <= set(cells(layers._repr_html_()))
    assert "passed" in operator.certificate._repr_html_()
    memory = Basis(operator.n, capacity=4)
    assert "0 of 4 rows" in memory._repr_html_()
    memory.extend(torch.eye(2, operator.n), task="<old> & done", values=[3.0, -1.0])
    assert "<old> & done" in cells(memory._repr_html_())  # escaped, and so read back


def test_a_spark_line_goes_up_and_down_from_zero():
    bars = list(parsed(f"<i>{spark([2.0, -1.0, 0.0])}</i>").iter("rect"))
    tops = [float(bar.get("y")) for bar in bars]
    heights = [float(bar.get("height")) for bar in bars]
    assert heights[0] == pytest.approx(2 * heights[1], rel=0.05)
    assert tops[0] + heights[0] == pytest.approx(tops[1], abs=0.2)  # zero is one line
    assert spark([]) == ""
    assert "<script>" not in block("<script>", ["<script>"], [["<script>"]])


# -- slices of the loss ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["BERT", "graph", "U-Net", "LSTM"])
def test_a_slice_is_the_loss_at_moved_parameters_for_any_model(name):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    operator = Hessian(model, case.loss, case.data, **case.options)
    pairs = lanczos(operator, k=2, tol=1e-2, progress=False)
    before = curvlab.parameter_vector(model)
    found = landscape(operator, pairs.vectors, radius=0.5, points=5)
    assert torch.equal(curvlab.parameter_vector(model), before)
    assert float(found.losses[2, 2]) == pytest.approx(operator.loss, rel=1e-6)
    with torch.no_grad():
        moved = before + 0.5 * pairs.vectors[0] - 0.25 * pairs.vectors[1]
        curvlab.load_parameter_vector(model, moved)
    there = Hessian(model, case.loss, case.data, **case.options).loss
    assert float(found.losses[4, 1]) == pytest.approx(there, rel=1e-5)


def test_the_quadratic_is_the_loss_where_the_loss_is_quadratic():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = batch()[0]
    operator = Hessian(model, mse_loss, (x, torch.zeros(8, 2).double()))
    rows = torch.randn(2, operator.n, dtype=torch.float64)
    plane = landscape(operator, rows, points=5)
    assert torch.allclose(plane.losses, plane.quadratic, rtol=1e-12)
    line = landscape(operator, rows[0], radius=2.0, points=3)
    assert torch.allclose(line.losses, line.quadratic, rtol=1e-12)
    assert "1 direction(s), steps to 2" in repr(line)


def test_slices_refuse_what_they_cannot_mean():
    operator = GaussNewton(net(), cross_entropy, batch())
    with pytest.raises(ValueError, match=r"pairs\.vectors\[:2\]"):
        landscape(operator, torch.zeros(3, operator.n))
    with pytest.raises(ValueError, match="odd"):
        landscape(operator, torch.zeros(1, operator.n), points=4)
    with pytest.raises(TypeError, match="curvature of a model"):
        landscape(curvlab.Dense(torch.eye(3)), torch.zeros(1, 3))


@pytest.mark.parametrize("directions", [1, 2])
def test_a_slice_can_be_drawn(directions, tmp_path):
    plots = pytest.importorskip("curvlab.plots")
    pytest.importorskip("matplotlib")
    operator = Hessian(net(), cross_entropy, batch())
    found = landscape(operator, torch.eye(directions, operator.n).double(), points=5)
    (path,) = plots.write(plots.landscape(found), tmp_path / "slice.png")
    assert path.read_bytes()[:4] == b"\x89PNG"


# -- training loops --------------------------------------------------------------------------------


class Writer:
    """Keeps what a SummaryWriter, or a wandb run, would be given."""

    def __init__(self):
        self.scalars, self.lines = [], []

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def log(self, figures, step):
        self.lines.append((figures, step))


def test_a_watch_tells_sharpness_trace_and_protection_and_disturbs_nothing():
    model, (x, y) = net(), batch()
    writer = Writer()
    basis = Basis(curvlab.parameter_count(model), capacity=3)
    basis.extend(
        lanczos(Hessian(model, cross_entropy, (x, y)), k=2, progress=False).vectors.float()
    )
    watch = Watch(model, cross_entropy, (x, y), every=2, probes=6, basis=basis,
                  log=tensorboard(writer))  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torch.get_rng_state()
    for step in range(4):
        told = watch.at(step)
        assert bool(told) == (step % 2 == 0)
        if told:
            dense = Hessian(model, cross_entropy, (x, y)).dense()
            top = float(torch.linalg.eigvalsh(dense)[-1])
            assert told["curvature/sharpness"] == pytest.approx(top, rel=2e-2)
            off = abs(told["curvature/trace"] - float(dense.trace()))
            assert off <= 5 * told["curvature/trace_error"] + 1e-9
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert torch.equal(torch.get_rng_state(), state)
    leaks = [value for name, value, _ in writer.scalars if name == "curvature/leak"]
    assert leaks[0] == 0.0
    assert 0.1 < leaks[1] <= 1.0  # plain SGD moves along the top directions
    assert watch.tracker.steps == [0, 2]


def test_a_watch_writes_to_wandb_and_refuses_no_steps():
    writer = Writer()
    watch = Watch(net(), cross_entropy, batch(), every=5, log=wandb(writer))
    watch.at(0)
    watch.at(3)
    watch.at(5)
    assert [step for _, step in writer.lines] == [0, 5]
    with pytest.raises(ValueError, match="every="):
        Watch(net(), cross_entropy, batch(), every=0)


def test_transformers_trainer_reports_curvature_with_its_own_figures(tmp_path):
    transformers = pytest.importorskip("transformers")
    from curvlab.callbacks.transformers import attach

    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=8, num_labels=2,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    ids = torch.randint(0, 30, (8, 5))
    rows = [{"input_ids": ids[i], "labels": torch.tensor(i % 2)} for i in range(8)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    data = {"input_ids": ids, "labels": torch.arange(8) % 2}
    attach(trainer, Watch(model, None, data, every=2))
    trainer.train()
    told = [line for line in trainer.state.log_history if "curvature/sharpness" in line]
    assert [line["step"] for line in told] == [0, 2, 4]


def test_lightning_logs_curvature(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from curvlab.callbacks.lightning import CurvatureCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            return self.net(x)

        def training_step(self, pair):
            return cross_entropy(self(pair[0]), pair[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    watch = Watch(module.net, cross_entropy, batch(), every=2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch()), batch_size=2)
    trainer = lightning.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=tmp_path, accelerator="cpu", callbacks=[CurvatureCallback(watch)],
    )  # fmt: skip
    trainer.fit(module, loader)
    assert watch.tracker.steps == [2, 4]
    assert "curvature/sharpness" in trainer.callback_metrics


def test_submodules_are_reached_from_the_package():
    assert curvlab.losses.next_token.shift == 1
    with pytest.raises(AttributeError, match="no attribute 'loses'"):
        _ = curvlab.loses
