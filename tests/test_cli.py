"""The ``curvlab`` command, verb by verb, on models that are not in the repository."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from curvlab import Basis, Eigenpairs
from curvlab.cli import main
from curvlab.cli.verbs import VERBS
from curvlab.storage import read_manifest

# A small language model, and a ResNet in torchvision's style, as a user would have them.
USER = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def data(shuffle=False):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(10, 5, generator=g)
    y = torch.randint(3, (10,), generator=g)
    return DataLoader(TensorDataset(x, y), batch_size=4, shuffle=shuffle, drop_last=shuffle)

def shuffled():
    return data(True)

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

def dropping():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3))

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(7, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.body(self.words(tokens), mask=mask, is_causal=True)).transpose(1, 2)

def text():
    tokens = torch.randint(7, (6, 5), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + x)

class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.layer1 = Block(4)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(torch.flatten(self.avgpool(self.layer1(self.conv1(x))), 1))

def images():
    g = torch.Generator().manual_seed(2)
    return torch.randn(4, 3, 8, 8, generator=g), torch.randint(3, (4,), generator=g)

def fails():
    raise RuntimeError("no such bucket")

def number():
    return 3
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "user.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(place, capsys):  # noqa: ARG001
    def call(*words):
        code = main([str(word) for word in words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


NET = ("--model", "user.py:net", "--data", "user.py:data")


def test_eig_writes_file_table_and_pictures(run, place):
    code, out, err = run("eig", *NET, "--k", 3, "--out", "r/top.safetensors", "--picture",
                         "r/top.png", "r/top.svg")  # fmt: skip
    assert code == 0, err
    pairs = Eigenpairs.load("r/top.safetensors")
    assert len(pairs) == 3
    assert f"{float(pairs.values[0]):.7g}" in out
    assert (place / "r/top.png").read_bytes()[:4] == b"\x89PNG"
    assert b"<svg" in (place / "r/top.svg").read_bytes()[:500]
    about = read_manifest("r/top.safetensors")["about"]
    assert about["samples"] == 10
    assert about["arguments"][0] == "eig"
    assert sorted(p.name for p in (place / "r").iterdir()) == ["top.png", "top.safetensors",
                                                              "top.svg"]  # fmt: skip


@pytest.mark.parametrize("kind", ["hessian", "ggn", "fisher", "empirical-fisher", "functional"])
def test_every_curvature_and_json(run, kind):
    code, out, err = run("eig", *NET, "--k", 2, "--curvature", kind, "--json", "-q")
    assert code == 0, err
    found = json.loads(out)
    assert len(found["values"]) == 2
    assert err == ""


def test_a_language_model_and_a_resnet_that_nobody_here_wrote(run):
    code, out, err = run(
        "eig", "--model", "user:Language", "--data", "user:text", "--k", 2, "--json"
    )
    assert code == 0, err
    assert json.loads(out)["converged"] == [True, True]
    resnet = ("--model", "user:ResNet", "--data", "user:images", "--mode", "eval")
    code, out, err = run("eig", *resnet, "--k", 2, "--select", "fc.*", "--json",
                         "--overwrite")  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["n"] == 15
    code, out, _ = run("doctor", *resnet)
    assert code == 0
    assert "BatchNorm never trained" in out


def test_not_converged_is_exit_code_one_with_the_reason(run):
    for most in (5, 9):
        code, out, err = run("eig", "--model", "curvlab.nets:mlp", "--json", "--overwrite",
                             "--data", "curvlab.cli.demo:digits",
                             "--k", 6, "--tol", 1e-4, "--max-products", most)  # fmt: skip
        assert code == 1
        assert json.loads(out)["products"] == most
        assert "not all pairs converged: max_products ran out" in err
    assert run("eig", *NET, "--max-products", 1)[0] == 2


def test_layers_that_did_not_converge_are_named_with_the_reason(run):
    code, out, err = run("layers", *NET, "--k", 10000, "--tol", 1e-7)
    assert code == 1
    assert "not converged" in out
    assert "0: not all pairs converged: the tolerance is below the operator's precision" in err
    assert run("layers", *NET, "--k", 2)[::2] == (0, "")


def test_weights_come_from_safetensors_and_pickles_are_refused_with_the_cure(run, place):
    import importlib.util

    spec = importlib.util.spec_from_file_location("user_model", place / "user.py")
    user = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(user)
    model = user.net()
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    save_file(model.state_dict(), "weights.safetensors")
    plain = json.loads(run("trace", *NET, "--json")[1])
    loaded = json.loads(run("trace", *NET, "--checkpoint", "weights.safetensors", "--json")[1])
    assert loaded["trace"] != plain["trace"]
    torch.save(model.state_dict(), "weights.pt")
    code, _, err = run("trace", *NET, "--checkpoint", "weights.pt")
    assert code == 2
    assert "pickles are not read" in err
    assert "weights_only=True" in err
    shutil.copy("weights.pt", "renamed.safetensors")
    code, _, err = run("trace", *NET, "--checkpoint", "renamed.safetensors")
    assert code == 2
    assert "a pickle by its content" in err
    save_file({"0.weight": torch.zeros(2, 2), "more": torch.zeros(1)}, "other.safetensors")
    code, _, err = run("trace", *NET, "--checkpoint", "other.safetensors")
    assert code == 2
    assert "of another model: 3 missing (0.bias, 2.weight, 2.bias); 1 unknown (more)" in err
    assert "0.weight is (2, 2), not (6, 5)" in err


def test_density_and_trace_agree_with_each_other(run):
    words = ("--probes", 6, "--steps", 30)
    code, out, err = run("density", *NET, *words, "--json", "--picture", "d.png")
    assert code == 0, err
    found = json.loads(out)
    assert found["pictures"] == ["d.png"]
    code, out, _ = run("trace", *NET, "--probes", 300, "--json")
    exact = json.loads(out)["trace"]
    assert abs(found["trace"] - exact) <= 6 * found["trace error"] + 1e-4
    assert code == 0


def test_compare_of_a_result_with_itself_and_with_a_basis(run):
    run("eig", *NET, "--k", 3, "--out", "a.safetensors")
    run("eig", *NET, "--k", 3, "--out", "b.safetensors", "--seed", 5)
    code, out, _ = run("compare", "a.safetensors", "b.safetensors", "--picture", "o.png", "--json")
    assert code == 0
    assert json.loads(out)["overlap"] == pytest.approx(1.0, abs=1e-4)
    pairs = Eigenpairs.load("a.safetensors")
    basis = Basis(pairs.n, 2)
    basis.extend(pairs.vectors[:2])
    basis.save("m.safetensors")
    code, out, _ = run("compare", "m.safetensors", "a.safetensors")
    assert code == 0
    assert "2 and 3" in out
    Basis(5, 1).save("other.safetensors")
    code, _, err = run("compare", "a.safetensors", "other.safetensors")
    assert code == 2
    assert "belong to different models" in err
    code, _, err = run("eig", *NET, "--k", 1, "--deflate", "a.safetensors", "--json")
    assert code == 0, err


def test_plot_draws_saved_results(run, place):
    run("eig", *NET, "--k", 3, "--out", "a.safetensors")
    run("density", *NET, "--probes", 2, "--steps", 8, "--out", "d.safetensors")
    code, out, _ = run("plot", "a.safetensors", "a.safetensors", "--picture", "p.png", "p.pdf")
    assert (code, out.split()) == (0, ["p.png", "p.pdf"])
    assert (place / "p.pdf").read_bytes()[:4] == b"%PDF"
    assert run("plot", "d.safetensors", "--picture", "d.svg")[0] == 0
    code, _, err = run("plot", "a.safetensors", "d.safetensors", "--picture", "x.png")
    assert code == 2
    assert "files of one kind" in err


def test_rerun_reproduces_and_notices_what_changed(run, place):
    run("eig", *NET, "--k", 3, "--out", "a.safetensors", "--picture", "a.png")
    code, _, err = run("rerun", "a.safetensors")
    assert code == 2
    assert "--model user.py:" in err
    assert "--yes" in err
    assert not (place / "a.rerun.safetensors").exists()
    before = (place / "a.png").stat().st_mtime_ns
    code, out, err = run("rerun", "a.safetensors", "--yes")
    assert code == 0, err
    assert (place / "a.png").stat().st_mtime_ns == before, "pictures are left alone"
    assert "the same" in out
    assert (place / "a.rerun.safetensors").exists()
    text = (place / "user.py").read_text()
    (place / "user.py").write_text(text.replace("torch.randn(10, 5", "2 * torch.randn(10, 5"))
    code, out, _ = run("rerun", "a.safetensors", "--yes")
    assert code == 1
    assert "the data" in out
    Eigenpairs.load("a.safetensors").save("python.safetensors")
    code, _, err = run("rerun", "python.safetensors")
    assert code == 2
    assert "written from Python" in err


def test_eig_above_a_threshold_gives_all_of_them(run):
    run("eig", *NET, "--k", 6, "--which", "LA", "--out", "top.safetensors")
    values = Eigenpairs.load("top.safetensors").values
    middle = float(values[3] + values[4]) / 2
    code, out, err = run("eig", *NET, "--above", middle, "--which", "LA", "--json")
    assert code == 0, err
    assert json.loads(out)["values"] == pytest.approx(values[:4].tolist(), rel=1e-4)
    code, out, err = run("eig", *NET, "--above", 1e6, "--which", "LA", "--picture", "none.png",
                         "--out", "none.safetensors")  # fmt: skip
    assert code == 0, err
    assert run("eig", *NET, "--above", 1.0, "--which", "both")[0] == 2
    code, _, err = run("eig", *NET, "--above", 1.0, "--k", 5)
    assert code == 2
    assert "not allowed with argument" in err  # it took no notice of --k


def test_rerun_takes_only_whole_options_of_verbs_that_make_files(run, place):
    own = ["--model", "curvlab.nets:mlp", "--data", "curvlab.cli.demo:digits"]
    run("eig", *own, "--k", 1, "--tol", 0.1, "--out", "own.safetensors")
    code, out, err = run("rerun", "own.safetensors")  # curvlab's own code: nothing to ask
    assert code == 0, err
    assert "the same" in out
    pairs = Eigenpairs.load("own.safetensors")
    stray = str(place / "stray.safetensors")
    for arguments, words in (
        (["eig", *own, f"--ou={stray}"], "does not know"),
        (["eig", *own, "--pict", "x.png"], "does not know"),
        (["bench", "--", "x"], "makes no files"),
        ([{"a": 1}], "by which command"),
        ("eig", "by which command"),
        (["eig", "--model", "http.server:test", "--data", "curvlab.cli.demo:digits"], "--yes"),
        (["eig", "--model", "curvlab.netsx:f", "--data", "curvlab.cli.demo:digits"], "--yes"),
        (
            ["eig", "--model", "curvlab.nets:mlp.__call__", "--data", "curvlab.cli.demo:digits"],
            "--yes",
        ),
        (["eig", *own[:2], "--data", "curvlab.tasks.download:main"], "--data curvlab.tasks.downl"),
        (["eig", *own[:2], "--data", "curvlab.tasks.embedded:load"], "--yes"),
        (["eig", *own, "--loss", "curvlab.losses:torch.hub.list"], "--yes"),
        (["eig", *own, "--count", "curvlab.tasks:Path.cwd"], "--yes"),
    ):
        pairs.save("made.safetensors", {"arguments": arguments})
        code, _, err = run("rerun", "made.safetensors")
        assert code == 2, (arguments, err)
        assert words in err
    assert not (place / "stray.safetensors").exists()
    assert run("eig", *own, "--o", "x.safetensors")[0] == 2


def test_doctor_exit_code_can_be_used_in_scripts(run):
    assert run("doctor", *NET)[0] == 0
    code, out, _ = run("doctor", "--model", "user.py:dropping", "--data", "user.py:shuffled",
                       "--json")  # fmt: skip
    assert code == 1
    traps = [finding["trap"] for finding in json.loads(out)["findings"]]
    assert {"train-mode dropout", "changing data"} <= set(traps)


def test_plan_profile_and_version(run):
    code, out, err = run("plan", *NET, "--k", 3, "--tasks", 4, "--memory", "1G")
    assert code == 0, err
    assert "M in int8" in out
    code, out, _ = run("plan", *NET, "--k", 3, "--memory", "10K", "--json")
    assert code == 1
    assert json.loads(out)["fits"] is False
    counted = ("--counted", "--machine", "a100", "--ranks", 4)
    code, out, err = run("plan", *NET, "--k", 3, *counted)
    assert code == 0, err
    assert "sent by each rank" in out
    code, out, err = run("profile", *NET, "--rows", 3, "--rounds", 1, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert "product, retained" in found["seconds"]
    names = ["3 dense rows, float32", "3 dense rows, int8"]
    names += ["layer bases, energy 0.99", "Kronecker bases, energy 0.99"]
    assert [one["name"] for one in found["protections"]] == names
    for one in found["protections"]:
        assert one["leak"] <= 1e-6
        assert min(one["kept"], one["room"]) > 0
    code, out, _ = run("version", "--json")
    assert json.loads(out)["torch"] == str(torch.__version__)


def test_a_network_with_batchnorm_is_profiled(run):
    net = ("--model", "user.py:ResNet", "--data", "user.py:images", "--mode", "eval")
    code, out, err = run("profile", *net, "--rows", 2, "--rounds", 1)
    assert code == 0, err
    assert "layer bases, energy 0.99" in out


def test_half_of_a_verb_of_two_words_names_the_whole(run):
    code, _, err = run("bench")
    assert code == 2
    assert "did you mean bench eig?" in err


def test_every_verb_has_help_with_examples_that_parse(run):
    from curvlab.cli.parser import parse

    for name, verb in VERBS.items():
        code, out, _ = run(name, "--help")
        assert code == 0
        assert "examples:" in out
        for example in verb.examples:
            import shlex

            words = shlex.split(example)
            assert words[0] == "curvlab"
            assert parse(words[1:]).verb == name


@pytest.mark.slow
def test_demo_shows_a_spectrum_and_less_forgetting(run, place):
    code, out, err = run("demo", "--out", "demo", "--json", "-q")
    assert code == 0, err
    found = json.loads(out)
    assert found["forgetting"]["SGD-dagger"] < found["forgetting"]["SGD"]
    assert found["values"][0] > 1.0
    for name in found["pictures"]:
        assert (place / name).stat().st_size > 3000
    assert run("plot", "demo/SGD-11.safetensors", "--picture", "run.png")[0] == 0


MISTAKES = {
    ("eigg", *NET): (2, "did you mean eig?"),
    ("eig",): (2, "--model, --data"),
    ("eig", *NET, "--k", "0"): (2, "at least 1"),
    ("eig", *NET, "--k", "2.5"): (2, "at least 1"),
    ("eig", *NET, "--tol", "2"): (2, "from 0 to below 1"),
    ("eig", *NET, "--k", "4000"): (1, "--k is between 1 and n"),
    ("eig", *NET, "--out", "x.pt"): (2, ".safetensors file"),
    ("eig", *NET, "--picture", "x.gif"): (2, "a picture ends in"),
    ("eig", *NET, "--loss", "crossentropy"): (2, "--loss is one of cross_entropy"),
    ("eig", *NET, "--device", "cuda"): (2, "sees no CUDA device"),
    ("eig", *NET, "--device", "gpu"): (2, "is not a device"),
    ("eig", *NET, "--select", "nothing*"): (1, "matches no parameter"),
    ("eig", *NET, "--checkpoint", "absent.safetensors"): (2, "there is no file"),
    ("eig", *NET, "--deflate", "absent.safetensors"): (2, "does not exist"),
    ("eig", "--model", "user.py", "--data", "user.py:data"): (2, "module:function"),
    ("eig", "--model", "user.py:absent", "--data", "user.py:data"): (2, "has no 'absent'"),
    ("eig", "--model", "absent.py:net", "--data", "user.py:data"): (2, "there is no file"),
    ("eig", "--model", "absent:net", "--data", "user.py:data"): (2, "No module named"),
    ("eig", "--model", "user.py:fails", "--data", "user.py:data"): (2, "no such bucket"),
    ("eig", "--model", "user.py:number", "--data", "user.py:data"): (2, "torch.nn.Module; got int"),
    ("eig", "--model", "user.py:net", "--data", "user.py:number"): (1, "--data must be a batch"),
    ("eig", "--model", "user.py:net", "--data", "user.py:shuffled"): (1, "shuffles"),
    ("eig", "--model", "user.py:dropping", "--data", "user.py:data"): (1, "dropout mask"),
    ("eig", "--model", "user.py:net", "--data", "user.py:images"): (1, "does --data fit?"),
    ("eig", *NET, "--budget", "1K"): (1, "the budget leaves 0.0 MiB: pass a larger --budget"),
    ("trace", *NET, "--probe", "2"): (2, "did you mean --probes?\ntry: curvlab trace --help"),
    ("compare", "absent.safetensors", "absent.safetensors"): (2, "does not exist"),
    ("compare", "user.py", "user.py"): (2, "not a safetensors file"),
    ("plot", "absent.safetensors", "--picture", "x.png"): (2, "does not exist"),
    ("rerun", "absent.safetensors"): (2, "does not exist"),
    ("plan", *NET, "--memory", "much"): (2, "such as 500M or 8G"),
    ("plan", *NET, "--counted", "--machine", "abacus"): (2, "--machine is one of"),
    ("plan", *NET, "--machine", "a100"): (2, "goes with --counted"),
}


@pytest.mark.parametrize("words", MISTAKES, ids=lambda words: " ".join(words)[-48:])
def test_a_mistake_ends_in_one_line_of_advice(run, words):
    expected, message = MISTAKES[words]
    torch.cuda.is_available()
    code, out, err = run(*words)
    assert code == expected, err
    assert message in err
    assert "Traceback" not in out + err
    assert out == ""
    assert len(err.splitlines()) <= 2
    assert not list(Path().glob("*.partial"))
