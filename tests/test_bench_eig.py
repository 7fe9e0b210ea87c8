"""``curvlab bench eig``: gates, rounds and threads alike for all; leaderboards that merge."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks import eigensolvers, plain
from benchmarks.networks import SMALL
from benchmarks.spectra import outliers
from curvlab.bench import leaderboard, solvers
from curvlab.bench.contest import Contest, Timing, contest, enter
from curvlab.bench.gate import DENSE, judged, wanted
from curvlab.bench.peers import kept_graph
from curvlab.bench.problem import Problem, of_model
from curvlab.bench.solvers import Contender, Counted
from curvlab.bench.timing import Threads
from curvlab.cli import main
from curvlab.eigen import lanczos
from curvlab.operators import Dense, FromFunction, GaussNewton, Hessian

TIMING, ONE = Timing(1), [Threads(1, 1)]
USER = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

def data():
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 5, generator=g), torch.randint(3, (n,), generator=g)) for n in (6, 3)]

def dense(operator, k, tol):
    matrix = operator @ torch.eye(operator.n)
    values, columns = torch.linalg.eigh(0.5 * (matrix + matrix.T).double())
    order = values.abs().argsort(descending=True)[:k]
    return values[order], columns.T[order].float()

def sloppy(operator, k, tol):
    values, vectors = dense(operator, k, tol)
    return values, vectors + 0.01

def broken(operator, k, tol):
    raise RuntimeError("out of luck")
"""


def spectrum(n) -> Problem:
    operator = outliers(n)
    return Problem("small outliers", lambda: operator, operator, spectrum=operator.values)


def entered(found, contender, truth, tol=1e-3):
    return enter(found, contender, truth, tol, TIMING, ONE)


def test_a_solver_that_misses_the_residual_is_not_timed():
    found = spectrum(2_000)
    right = lanczos(found.operator, 3, tol=1e-6, progress=False)
    noise = torch.randn(right.vectors.shape, generator=torch.Generator().manual_seed(0))
    blurred = right.vectors + 0.01 * noise / noise.norm(dim=1, keepdim=True)
    wrong = Contender("1", lambda: lambda _: (right.values, blurred, 7), [1e-3, 1e-4])
    outcome = entered(found, wrong, right.values)
    rows = eigensolvers.rows_of(Contest(found, 3, 1e-3, "", {"it": outcome}, {}))
    assert {one.metric for one in rows} == {"residual", "missing", "residual at defaults"}
    broken = Contender("1", lambda: lambda _: torch.zeros(1) @ torch.zeros(2), [1e-3])
    failed = entered(found, broken, right.values)
    assert (failed.residual, failed.missing) == (math.inf, 3)
    assert "RuntimeError" in failed.failure


def test_vectors_that_are_short_or_copies_do_not_pass():
    matrix = torch.diag(torch.tensor([5.0, 4.0, 4.0, 1.0, 0.5], dtype=torch.float64))
    operator, truth = Dense(matrix), torch.tensor([5.0, 4.0, 4.0], dtype=torch.float64)
    vectors = torch.eye(5, dtype=torch.float64)
    assert judged(operator, (truth, vectors[:3], 1), truth, 1e-3) == (0.0, 0)
    assert judged(operator, (truth, vectors[[0, 1, 1]], 1), truth, 1e-3)[1] == 1
    assert judged(operator, (truth[[1, 1, 2]], vectors[[1, 1, 2]], 1), truth, 1e-3)[1] == 1
    blurred = 1e-6 * (vectors[:3] + 0.1)
    assert judged(operator, (truth, blurred, 1), truth, 1e-3)[0] > 1e-2
    with pytest.raises(ValueError, match=r"values \(3,\) and vectors \(3, 5\)"):
        judged(operator, (truth, vectors[:, :3], 1), truth, 1e-3)


def test_a_solver_is_timed_with_its_fastest_threads_and_with_its_set_up():
    found = spectrum(2_000)
    right = lanczos(found.operator, 3, tol=1e-6, progress=False)
    now = 0.0

    def prepare():
        nonlocal now
        now += 5.0

        def solve(_):
            nonlocal now
            now += {1: 2.0, 2: 7.0}[torch.get_num_threads()]
            return right.values, right.vectors, 9

        return solve

    settings = [Threads(2, 2), Threads(1, 1), Threads(2, 1)]
    one = Contender("1", prepare, [1e-3])
    outcome = enter(found, one, right.values, 1e-3, Timing(2, lambda: now), settings)
    assert outcome.threads == Threads(1, 1)
    assert outcome.samples == []  # the runs that chose are not those that are reported


def test_every_solver_gets_its_rounds_and_ratios_are_taken_inside_them():
    found = spectrum(2_000)
    result = contest(
        found, 3, 1e-3, 2, whole=False, only=["lanczos", "scipy eigsh"], settings=ONE,
        timing=TIMING, say=lambda _: None,
    )  # fmt: skip
    assert all(len(one.samples) >= 2 for one in result.outcomes.values())
    lines = {line.solver: line for line in leaderboard.lines_of(result)}
    assert lines["lanczos"].speed == (1.0, 1.0, 1.0)
    assert all(line.right and line.time > line.time_reused for line in lines.values())
    a, b = result.outcomes["lanczos"], result.outcomes["lanczos, uncertified"]
    first = a.samples[0].whole / b.samples[0].whole
    assert b.against(a)[0] == pytest.approx(first)


def test_the_blas_of_scipy_is_held_to_its_threads():
    threadpoolctl = pytest.importorskip("threadpoolctl")
    pytest.importorskip("scipy.linalg")

    def blas():
        found = threadpoolctl.threadpool_info()
        return {one["num_threads"] for one in found if one["user_api"] == "blas"}

    before = blas(), torch.get_num_threads()
    with Threads(2, 1).pinned():
        assert (blas(), torch.get_num_threads()) == ({1}, 2)
    assert (blas(), torch.get_num_threads()) == before


def test_a_kept_graph_gives_the_product_of_a_graph_made_anew():
    network = SMALL["mlp"]().double()
    vectors = torch.randn(2, network.n, dtype=torch.float64)
    exact = plain.plain_hessian(network)(vectors)
    x, y = network.inputs, network.targets
    for cuts in ([len(x)], [5, len(x) - 5]):
        batches = list(zip(x.split(cuts), y.split(cuts), strict=True))
        kept = kept_graph.hessian(network.model, network.loss, batches)(vectors)
        assert float((kept - exact).norm() / exact.norm()) <= 1e-13


def test_the_wanted_values_of_a_small_operator_come_from_the_dense_matrix():
    values = torch.linspace(-3.0, 2.0, 60, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(60, 60, dtype=torch.float64)).Q
    operator = Dense(rotation @ torch.diag(values) @ rotation.T)
    exact = values[values.abs().argsort(descending=True)[:5]]
    found, way = wanted(Problem("small", lambda: operator, operator), 5, 1e-3)
    assert float((found - exact).abs().max()) <= 1e-12
    assert "dense" in way


def test_the_wanted_values_are_as_near_as_precision_allows_or_refused():
    """Rounding of the largest value is long beside the others, as in a ViT's Hessian."""
    n = DENSE + 100
    values = torch.linspace(-0.5, 0.5, n)
    values[:6] = torch.tensor([300.0, 2.0, 1.8, 1.6, 1.4, -1.3])
    mirror = torch.randn(n, generator=torch.Generator().manual_seed(0))
    mirror /= mirror.norm()

    def turned(vector):
        return vector - 2.0 * (vector @ mirror)[..., None] * mirror

    def product(vector):
        return turned(turned(vector) * values)

    operator = FromFunction(product, n, dtype=torch.float32)
    problem = Problem("rounded", lambda: operator, operator)
    found, way = wanted(problem, 6, 1e-3)
    assert "precision" in way
    assert ((found - values[:6]).abs() <= 1e-3 * values[:6].abs()).all()
    with pytest.raises(ValueError, match=r"a 30th of the tolerance.*precision"):
        wanted(problem, 6, 1e-4)


def test_a_block_of_columns_is_one_product_and_counts_as_its_columns():
    calls = []

    def product(block):
        calls.append(tuple(block.shape))
        return 2.0 * block

    counted = Counted(outliers(2_000), product)
    columns = torch.arange(6_000.0).reshape(2_000, 3).numpy()
    assert (solvers._numpy(counted).matmat(columns) == 2.0 * columns).all()
    assert (calls, counted.count) == ([(3, 2_000)], 3)


def test_other_tools_get_a_model_only_where_they_mean_the_same():
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.randint(3, (12,))
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    loss = functional.cross_entropy

    def of(kind=Hessian, loss=loss, **more):
        return of_model("it", lambda: kind(net, loss, (x, y), **more), loss).plain

    assert of(mode="batch-statistics") is None
    found = of(mode="eval", dtype=torch.float64)
    assert not found.model.training
    assert net.training
    assert isinstance(found.loss, nn.CrossEntropyLoss)
    exact = Hessian(net, loss, (x, y), mode="eval", dtype=torch.float64)
    vector = torch.randn(1, exact.n, dtype=torch.float64)
    theirs = kept_graph.hessian(*found.arguments)(vector)
    assert float((theirs - exact @ vector).norm() / theirs.norm()) <= 1e-10
    net.eval()
    assert of(kind=GaussNewton).kind == "gauss_newton"
    assert of(select=["0.*"]) is None
    assert of(loss=nn.CrossEntropyLoss(reduction="sum")) is None


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(USER)
    return tmp_path


NET = ("bench", "eig", "--model", "mine.py:net", "--data", "mine.py:data")


@pytest.mark.usefixtures("place")
def test_the_command_compares_a_users_solver_and_adds_to_a_leaderboard(capsys):
    more = ("--k", "3", "--rounds", "1", "--threads", "1/1", "--picture", "it.png", "--json")
    own = ("--solver", "mine.py:dense", "--solver", "mine.py:sloppy", "--solver", "mine.py:broken")
    assert main([*NET, *more, *own]) == 0
    shown, said = capsys.readouterr()
    lines = {line["solver"]: line for line in json.loads(shown)["lines"]}
    assert lines["mine.py:dense"]["right"]
    assert lines["mine.py:dense"]["products"] == 57
    assert lines["scipy eigsh, kept graph"]["right"]
    assert not lines["mine.py:sloppy"]["right"]
    assert lines["mine.py:sloppy"]["time"] is None
    assert "out of luck" in lines["mine.py:broken"]["failure"]
    assert "out of luck" in said
    assert lines["lanczos"]["samples"] >= 1
    assert lines["lanczos"]["command"]
    assert "numba" in lines["lanczos"]["environment"]
    assert Path("it.png").read_bytes()[:4] == b"\x89PNG"
    count = len(Path("leaderboard.jsonl").read_text().splitlines())
    again = ("--k", "2", "--rounds", "1", "--threads", "1/1", "--only", "lanczos")
    assert main([*NET, *again, "--solver", "mine.py:dense"]) == 0
    assert "mine.py:dense" in capsys.readouterr().out
    assert len(Path("leaderboard.jsonl").read_text().splitlines()) == count + 3


@pytest.mark.usefixtures("place")
def test_the_solver_of_the_guide_passes_the_gate(capsys):
    guide = Path(leaderboard.__file__).parents[1] / "guide" / "extending.md"
    (block,) = re.findall(r"^```python\n(def solve\(.*?)\n\n", guide.read_text(), re.S | re.M)
    Path("guide.py").write_text(f"import torch\n{block}\n")
    more = ("--k", "3", "--rounds", "1", "--threads", "1/1", "--only", "lanczos", "--json")
    assert main([*NET, *more, "--solver", "guide.py:solve"]) == 0
    lines = {line["solver"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert lines["guide.py:solve"]["right"], lines["guide.py:solve"]


@pytest.mark.usefixtures("place")
def test_a_wrong_command_ends_with_what_to_change(capsys):
    Path("taken.jsonl").write_text('{"format": "other"}\n')
    for more, words in (
        (["--solver", "mine.py:nobody"], "has no 'nobody'"),
        (["--out", "taken.jsonl"], "taken.jsonl, line 1"),
        (["--k", "99"], "--k must be below n = 57"),
        (["--threads", "2"], "two whole numbers such as 2/1 are needed; got '2'"),
    ):
        assert main([*NET, *more]) == 2
        assert words in capsys.readouterr().err
    assert Path("taken.jsonl").read_text() == '{"format": "other"}\n'


@pytest.mark.usefixtures("place")
def test_leaderboards_merge_in_any_order_any_number_of_times(capsys):
    more = ("--k", "2", "--rounds", "1", "--threads", "1/1", "--only", "lanczos", "--quiet")
    assert main([*NET, *more]) == 0
    old = leaderboard.read(Path("leaderboard.jsonl"))
    new = [replace(line, when="9999", products=1) for line in old[:1]]
    other = [replace(line, environment="another machine") for line in old]
    expected = leaderboard.merge([*old, *new, *other])
    assert len(expected) == 2 * len(old)
    assert sum(line.products == 1 for line in expected) == 1
    for order in itertools.permutations([old, new, other, old]):
        assert leaderboard.merge(line for some in order for line in some) == expected
    leaderboard.write(Path("new.jsonl"), new)
    leaderboard.write(Path("other.jsonl"), other)
    capsys.readouterr()
    files = ("leaderboard.jsonl", "other.jsonl", "new.jsonl")
    assert main(["bench", "merge", *files, "--out", "all.jsonl"]) == 0
    assert leaderboard.read(Path("all.jsonl")) == expected
    assert capsys.readouterr().out.count("x lanczos") == 3  # two tables and the last line


@pytest.mark.usefixtures("place")
def test_whatever_a_users_solver_returns_the_others_are_measured_and_the_reason_is_told(capsys):
    bodies = {
        "nan": "v, w = dense(o, k, t); return v * float('nan'), w",
        "zeros": "v, w = dense(o, k, t); return v, 0 * w",
        "arrays": "v, w = dense(o, k, t); return v.numpy(), w.numpy()",
        "alone": "return dense(o, k, t)[0]",
        "nothing": "return None",
        "ends": "raise SystemExit(3)",
        "watched": "v, w = dense(o, k, t); return v.requires_grad_(), w.requires_grad_()",
    }
    Path("own.py").write_text(
        "from mine import dense\n"
        + "".join(f"def {name}(o, k, t):\n    {body}\n" for name, body in bodies.items())
    )
    own = [word for name in bodies for word in ("--solver", f"own.py:{name}")]
    more = ("--k", "3", "--rounds", "1", "--threads", "1/1", "--only", "lanczos", "--json")
    assert main([*NET, *more, *own]) == 0
    found = {line["solver"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    lines = {name: found[f"own.py:{name}"] for name in bodies}
    for name in ("nan", "zeros"):
        assert "NaN, infinity or a vector of zeros" in lines[name]["failure"]
    assert "two tensors, values and vectors; got ndarray" in lines["arrays"]["failure"]
    assert "values (k,) and vectors (k, n); got Tensor" in lines["alone"]["failure"]
    assert "got NoneType" in lines["nothing"]["failure"]
    assert lines["ends"]["failure"] == "SystemExit: 3"
    assert lines["watched"]["right"]
    assert found["lanczos"]["right"]


@pytest.mark.usefixtures("place")
def test_a_name_that_no_solver_has_is_told_and_leaves_no_file(capsys):
    more = ("--k", "2", "--rounds", "1", "--threads", "1/1", "--only")
    assert main([*NET, *more, "lanzcos"]) == 2
    said = capsys.readouterr().err
    assert "no solver's name begins so; there are lanczos, " in said
    assert not Path("leaderboard.jsonl").exists()
    assert main([*NET, *more, "lanczos", "scipi", "--quiet"]) == 0
    assert "left out: scipi" in capsys.readouterr().err


@pytest.mark.usefixtures("place")
def test_what_was_measured_is_shown_where_it_cannot_be_written(capsys):
    Path("file").write_text("")
    more = ("--k", "2", "--rounds", "1", "--threads", "1/1", "--only", "lanczos")
    assert main([*NET, *more, "--out", "file/leaderboard.jsonl"]) == 1
    shown, said = capsys.readouterr()
    assert "lanczos, uncertified" in shown
    assert "could not write" in said


@pytest.mark.usefixtures("place")
def test_lines_that_another_run_added_meanwhile_are_kept():
    more = ("--k", "2", "--rounds", "1", "--threads", "1/1", "--only", "lanczos")
    assert main([*NET, *more]) == 0
    (first, *_) = leaderboard.read(Path("leaderboard.jsonl"))
    Path("leaderboard.jsonl").unlink()
    leaderboard.write(Path("other.jsonl"), [replace(first, environment="another machine")])
    Path("own.py").write_text(
        "import shutil\nfrom mine import dense\ndef solve(o, k, t):\n"
        "    shutil.copy('other.jsonl', 'leaderboard.jsonl')\n    return dense(o, k, t)\n"
    )
    assert main([*NET, *more, "--solver", "own.py:solve"]) == 0
    machines = {line.environment for line in leaderboard.read(Path("leaderboard.jsonl"))}
    assert machines == {first.environment, "another machine"}


@pytest.mark.usefixtures("place")
def test_a_damaged_leaderboard_is_named_with_its_line_and_field(capsys):
    more = ("--k", "2", "--rounds", "1", "--threads", "1/1", "--only", "lanczos")
    assert main([*NET, *more]) == 0
    good = json.loads(Path("leaderboard.jsonl").read_text().splitlines()[0])
    for change, words in (
        ({"problem": None}, "problem is None"),
        ({"time": [1.0, 2.0]}, "time is [1.0, 2.0]"),
        ({"k": "ten", "right": "no"}, "k is 'ten', right is 'no'"),
        ({"residual": math.nan, "samples": True}, "residual is nan, samples is True"),
    ):
        Path("bad.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(good | change)}\n")
        assert main(["bench", "merge", "bad.jsonl"]) == 2
        assert f"bad.jsonl, line 2 is damaged: {words}" in capsys.readouterr().err
    Path("bad.jsonl").write_bytes(b"\xff")
    assert main(["bench", "merge", "bad.jsonl"]) == 2
    assert "bad.jsonl is not a leaderboard" in capsys.readouterr().err
    odd = good | {"command": "a\u2028b", "tol": 1}
    Path("odd.jsonl").write_text(json.dumps(odd, ensure_ascii=False) + "\n", encoding="utf-8")
    assert main(["bench", "merge", "odd.jsonl"]) == 0
