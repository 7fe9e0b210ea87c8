"""Where an error names an option, the command line has it, and it cures."""

import inspect
import json
import re
from argparse import Namespace

import pytest
import torch

import curvlab
from curvlab.cli import main
from curvlab.cli.output import in_shell
from curvlab.cli.parser import build
from curvlab.cli.verbs import VERBS
from curvlab.storage import read_manifest

USER = """
import torch
from torch import nn
from torch.nn import functional as F
from curvlab import Objective

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

def half():
    return net().bfloat16()

def data():
    g = torch.Generator().manual_seed(1)
    return torch.randn(9, 4, generator=g), torch.randint(0, 3, (9,), generator=g)

def inputs():
    return data()[0]

def views():
    return data()[0], data()[0].flip(0)

WEIGHTS = torch.tensor([1.0, 3.0, 0.5])

def weighted(output, target):
    return F.cross_entropy(output, target, weight=WEIGHTS)

def weights_of(batch):
    return float(WEIGHTS[batch[1]].sum())

def _denoise(model, x):
    noise = torch.randn_like(x)
    return F.mse_loss(model(x + noise), noise[:, :3])

def _contrast(model, batch):
    one, other = (F.normalize(model(x), dim=1) for x in batch)
    return F.cross_entropy(one @ other.T, torch.arange(len(one)))

denoise, contrast = Objective(_denoise), Objective(_contrast)

class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = self.a(x)
        return self.b(torch.tanh(h + (torch.round(4 * h) / 4 - h).detach()))

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(6, 4), nn.Linear(4, 6)

    def forward(self, tokens):
        return self.head(torch.tanh(self.words(tokens)))

def text():
    tokens = torch.randint(0, 6, (4, 5), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[1, 2:] = -100
    return tokens, labels
"""

# what is refused, words of the refusal, and the option that cures it
CURES = {
    "weights": (("--data", "user.py:data", "--loss", "user.py:weighted"), "pass --count",
                ("--count", "user.py:weights_of")),
    "coupled": (("--data", "user.py:views", "--loss", "user.py:contrast"), '--chunk batch',
                ("--chunk", "batch")),
    "random": (("--data", "user.py:inputs", "--loss", "user.py:denoise", "--mode", "eval"),
               '--mode frozen-masks', ("--mode", "frozen-masks")),
    "bfloat16": (("--model", "user.py:half", "--data", "user.py:data"), "--dtype float32",
                 ("--dtype", "float32")),
    "estimator": (("--model", "user.py:Quantised", "--data", "user.py:data"), "--no-check",
                  ("--no-check",)),
    "tokens": (("--model", "user.py:Language", "--data", "user.py:text"), "losses.next_token",
               ("--loss", "next_token")),
}  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    (tmp_path / "user.py").write_text(USER)
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code = main([str(word) for word in words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.mark.parametrize("case", CURES)
def test_a_refusal_in_the_shell_names_an_option_that_cures_it(run, case):
    given, words, cure = CURES[case]
    if "--model" not in given:
        given = ("--model", "user.py:net", *given)
    code, _, err = run("eig", *given, "--k", 2)
    assert code == 1
    assert words in err
    if case == "random":  # another mode, in place of the first
        given = given[:-2]
    code, out, err = run("eig", *given, *cure, "--k", 2, "--json")
    assert code == 0, err
    assert len(json.loads(out)["values"]) == 2
    assert run("trace", *given, *cure, "--probes", 6)[0] == 0
    if case not in ("estimator",):  # which has no options of its own for this
        code, out, _ = run("doctor", *given, *cure)
        assert code == 0, out


def test_an_objective_a_count_and_a_chunk_reach_the_operator(run, tmp_path):
    code, _, err = run("eig", "--model", "user.py:net", "--data", "user.py:data", "--k", 1,
                       "--loss", "user.py:weighted", "--count", "user.py:weights_of",
                       "--chunk", 4, "--reduction", "mean", "--engine", "rebuilt",
                       "--out", "a.safetensors")  # fmt: skip
    assert code == 0, err
    about = read_manifest(tmp_path / "a.safetensors")["about"]
    assert about["engine"].startswith("rebuilt, 3 chunk(s)")
    spec = {}
    exec(USER, spec)
    x, y = spec["data"]()
    expected = spec["weighted"](spec["net"]()(x), y)
    assert about["loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
    code, _, err = run("rerun", "a.safetensors")
    assert code == 2
    assert "--count user.py:weights_of" in err
    code, _, err = run("eig", "--model", "user.py:net", "--data", "user.py:data", "--loss",
                       "user.py:WEIGHTS")  # fmt: skip
    assert code == 2
    assert "curvlab.Objective" in err


@pytest.mark.parametrize("verb", VERBS)
def test_usage_shows_the_verb(verb, capsys):
    with pytest.raises(SystemExit):
        build().parse_args([verb, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: curvlab {verb} [")


@pytest.mark.parametrize(
    "kind", [curvlab.Hessian, curvlab.GaussNewton, curvlab.EmpiricalFisher], ids=str
)
def test_help_documents_every_option_with_its_default(kind):
    shown = inspect.getdoc(kind.__init__)
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name == "self":
            continue
        entry = re.search(rf"^    {name}: (.*?)(?=^    \w+: |^\w|\Z)", shown, re.S | re.M)
        assert entry is not None, f"{name} is not documented"
        if parameter.default is not inspect.Parameter.empty:
            said = f'"{parameter.default}"' if isinstance(parameter.default, str) else None
            assert f"Default ``{said or parameter.default}``" in entry[1], name
    assert "snapshot" in inspect.getdoc(curvlab.operators.Curvature)


def test_the_losses_of_tokens_bring_their_own_count():
    spec = {}
    exec(USER, spec)
    tokens, labels = spec["text"]()
    from curvlab.losses import next_token

    model = spec["Language"]()
    cut = curvlab.Hessian(model, next_token, (tokens, labels), chunk=2)
    assert cut.loss == pytest.approx(float(next_token(model(tokens), labels)), rel=1e-6)
    assert torch.allclose(
        cut.dense(), curvlab.Hessian(model, next_token, (tokens, labels), chunk="batch").dense()
    )


def test_advice_is_given_as_the_shell_takes_it():
    options = Namespace(mode=None, dtype=None, max_products=None, no_check=False, checkpoint=None)
    for words, typed in {
        'pass mode="eval" or mode="frozen-masks"': "pass --mode eval or --mode frozen-masks",
        "dtype=torch.float64, or max_products=": "--dtype float64, or --max-products",
        "check=False takes it as it is": "--no-check takes it as it is",
        'room=Room(rows=8), Hessian(mode="eval")': 'room=Room(rows=8), Hessian(mode="eval")',
        "with checkpoint= the call goes on": "with checkpoint= the call goes on",
    }.items():
        assert in_shell(words, options) == typed
