"""The package as users install it: what the wheel holds, what an import costs, who imports whom."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What each part may import of ours. The direction is experiments -> curvlab -> curvlab_kernels.
MAY_IMPORT = {
    "kernels/curvlab_kernels": {"curvlab_kernels"},
    "curvlab": {"curvlab", "curvlab_kernels"},
    "experiments": {"experiments", "curvlab", "curvlab_kernels"},
    "benchmarks": {"benchmarks", "experiments", "curvlab", "curvlab_kernels"},
}
OURS = {"curvlab", "curvlab_kernels", "experiments", "benchmarks", "tests"}

# Inside curvlab: a module may import those of its own rank or of a lower one.
RANK = {
    "checks": 0, "storage": 0, "manifest": 0, "signals": 0,
    "precision": 0, "float32": 0, "parameters": 0, "refusals": 0, "html": 0,
    "rows": 1, "probe": 1, "nets": 1, "tasks": 1, "batches": 1, "loaders": 1,
    "basis": 2, "operators": 2, "layerwise": 2, "eigen": 3, "learners": 4, "training": 5,
    "metrics": 5, "losses": 3, "surface": 3, "callbacks": 4, "protection": 3,
    "distributed": 3, "plan": 6, "doctor": 6, "plots": 6, "public": 6, "bench": 7, "cli": 8,
}  # fmt: skip


def imports_of(path):
    """Absolute dotted names that the file imports, at the top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_go_in_one_direction(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        foreign = {name.partition(".")[0] for name in imports_of(path)} & OURS
        assert foreign <= MAY_IMPORT[folder], f"{path} imports {foreign - MAY_IMPORT[folder]}"


def test_layers_inside_curvlab_go_in_one_direction():
    for path in sorted((ROOT / "curvlab").rglob("*.py")):
        own = path.relative_to(ROOT / "curvlab").parts[0].removesuffix(".py")
        if own in ("__init__", "__main__"):
            continue
        assert own in RANK, f"give curvlab/{own} a rank in this test"
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "curvlab" and len(parts) > 1:
                assert RANK[parts[1]] <= RANK[own], f"{path}: {own} may not import {parts[1]}"


def test_a_wrong_import_would_be_seen(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    from experiments.demo import main\n    return main\n")
    assert "experiments.demo" in set(imports_of(wrong))


def test_kernels_is_not_itself_a_package():
    # A top-level import called `kernels` would overwrite another published package of that name.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_functions_that_share_a_modules_name_are_the_functions():
    code = (
        "import curvlab.doctor, curvlab.plan, curvlab.probe, curvlab\n"
        "from curvlab.plan import MACHINES\n"
        "print([f.__name__ for f in (curvlab.doctor, curvlab.plan, curvlab.probe)])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert shown.stdout.strip() == "['doctor', 'plan', 'probe']"


def test_importing_curvlab_is_light():
    heavy = ["triton", "matplotlib", "numba", "scipy", "PIL"]
    code = f"import sys, curvlab; print([m for m in {heavy} if m in sys.modules])"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert shown.stdout.strip() == "[]"


def test_a_first_spectrum_does_not_import_the_compiler_of_torch():
    code = """
import sys, torch, curvlab
net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
batch = torch.randn(9, 4), torch.arange(9) % 2
operator = curvlab.Hessian(net, torch.nn.functional.cross_entropy, batch)
curvlab.lanczos(operator, k=2, progress=False)
print("torch._dynamo" in sys.modules)
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert shown.stdout.strip() == "False"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = ["wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--quiet", "-w", str(out)]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    return next(out.glob("curvlab-*.whl"))


def test_the_wheel_holds_the_two_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "curvlab",
        "curvlab_kernels",
    }
    assert "curvlab/py.typed" in names
    assert "curvlab_kernels/py.typed" in names
    tracked = subprocess.run(
        ["git", "ls-files", "curvlab", "kernels/curvlab_kernels"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    missing = {n.removeprefix("kernels/") for n in tracked.stdout.split()} - set(names)
    assert not missing, "every tracked file of the packages, embedded data included, is shipped"


def test_another_package_called_kernels_survives_install_and_uninstall(wheel, tmp_path):
    stand_in = tmp_path / "kernels-9.0-py3-none-any.whl"
    with zipfile.ZipFile(stand_in, "w") as archive:
        archive.writestr("kernels/__init__.py", "WHOSE = 'theirs'\n")
        info = "kernels-9.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kernels\nVersion: 9.0\n")
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = venv / "bin" / "python"

    def pip(*arguments):
        subprocess.run([python, "-m", "pip", "--quiet", *arguments], check=True)

    def whose():
        code = "import kernels; print(kernels.WHOSE)"
        shown = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        return shown.stdout.strip()

    pip("install", "--no-deps", "--no-index", str(stand_in))
    pip("install", "--no-deps", "--no-index", str(wheel))
    assert whose() == "theirs"
    pip("uninstall", "-y", "curvlab")
    assert whose() == "theirs"
