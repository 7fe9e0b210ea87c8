"""Every Triton kernel against the float64 reference, through Triton's interpreter on the CPU.

The interpreter must be chosen before triton is imported, so the checks run in processes of their
own, all of them in two; each check is a test here.

No kernel has a branch for the interpreter: what runs here is the source that the GPU runs. What
does not run here is what the compiler makes of it: layouts, barriers, vector loads, fused
multiply-adds, the GPU's conversions, and races. ``test_audit.py`` looks at the compiled code;
``python -m curvlab_kernels.audit.gpu_check`` looks at the rest, on a GPU.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

PROCESSES = 2


def interpret(names: list[str]) -> list[subprocess.Popen]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    shares = [names[first::PROCESSES] for first in range(PROCESSES)]
    return [
        subprocess.Popen(
            [sys.executable, __file__, *share],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for share in shares
        if share
    ]


# Long vectors take long here. Of each kind of launch the one with the most branches is kept; the
# compiled kernels are executed with all of them (``test_ptx_kernels.py``).
KEPT = ("project-long-float32", "project-long-int8", "project-block-long-int8", "sgd-long-int8")
KEPT += ("project-list-long-int8",)


def check_names() -> list[object]:
    from curvlab_kernels.audit.agreement import checks

    names = [check.name for check in checks()] + list(EXTRA)
    slow = [name for name in names if "-long" in name and name not in KEPT]
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in names]


@pytest.fixture(scope="module")
def outcomes(wanted):
    """What the selected checks said: name to error text, empty if the check passed."""
    found = {}
    processes = interpret(wanted)
    for process in processes:
        output, errors = process.communicate(timeout=600)
        for line in output.splitlines():
            outcome = json.loads(line)
            found[outcome["name"]] = outcome["error"]
        found["died"] = found.get("died", "") + (errors[-3000:] if process.returncode else "")
    return found


def columns_beyond_32_bits(_device):
    """The third of three rows of 2^30 elements starts at 2^31, negative in 32 bits."""
    from curvlab_kernels import _triton, reference

    m, ld, n = 3, 2**30, 100
    with tempfile.TemporaryDirectory() as folder:
        stored = np.memmap(Path(folder) / "rows", dtype=np.float16, mode="w+", shape=(m, ld))
        rows = torch.from_numpy(stored)
        small = torch.linalg.qr(torch.randn(n, m, generator=torch.Generator().manual_seed(0))).Q.T
        rows[:, :n] = small
        expected = torch.randn(n, generator=torch.Generator().manual_seed(1))
        actual = expected.clone()
        removed = _triton.project_(rows, actual)
        wanted = reference.project_(rows, expected)
        assert float((removed - wanted).abs().max()) < 1e-6
        assert float((actual - expected).abs().max()) < 1e-6


def bytes_read(_device):
    """The model's bytes of the basis are those that the interpreter's loads ask for."""
    import triton.runtime.interpreter as interpreter
    from curvlab_kernels import _triton
    from curvlab_kernels._triton.launch import recorded
    from curvlab_kernels.audit.agreement import basis, pieces, random
    from curvlab_kernels.audit.model import traffic

    m, n = 40, 1600  # a multiple of 16: no padding to be read along
    rows, _ = basis(m, n, torch.float32)
    first, last = rows.data_ptr(), rows.data_ptr() + rows.numel() * rows.element_size()
    counted = 0
    load = interpreter.InterpreterBuilder.create_masked_load

    def counting(self, pointers, mask, *rest):
        nonlocal counted
        inside = (pointers.data >= first) & (pointers.data < last) & mask.data
        counted += int(inside.sum()) * rows.element_size()
        return load(self, pointers, mask, *rest)

    operations = {
        "project": lambda: _triton.project_(rows, random(n, dtype=torch.float32)),
        "list": lambda: _triton.project_list_(rows, pieces(n, 2, torch.float32)),
        "orthonormalise": lambda: _triton.orthonormalise_(rows, random(n, dtype=torch.float32)),
    }
    reads = {"project": 2, "list": 2, "orthonormalise": 3}
    interpreter.InterpreterBuilder.create_masked_load = counting
    try:
        for name, operation in operations.items():
            with recorded() as launches:
                operation()
            model = sum(traffic(launch).basis for launch in launches)
            counted = 0
            operation()
            assert counted == model == reads[name] * m * n * 4, f"{name}: {counted}, not {model}"
    finally:
        interpreter.InterpreterBuilder.create_masked_load = load


def broken_kernels_are_seen(device):
    """The comparison fails if a kernel misses one column, forgets a chunk, or writes nothing."""
    from curvlab_kernels import _triton
    from curvlab_kernels.audit import agreement

    whole = _triton.project_
    # The package has a function of the module's name.
    stage_two = sys.modules["curvlab_kernels._triton.dots"]
    sound = stage_two.sum_chunks

    def misses_the_last_column(rows, vectors, factor, scales):
        rows = rows.clone()
        rows[..., vectors.shape[-1] - 1] = 0
        return whole(rows, vectors, factor, scales)

    def writes_nothing(rows, vectors, factor, scales):
        return whole(rows, vectors.clone(), factor, scales)

    def error(check, *arguments):
        try:
            check(*arguments, device)
        except AssertionError as found:
            return str(found)
        return ""

    for broken in (misses_the_last_column, writes_nothing):
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            _triton.project_ = broken
            found = error(agreement.project, 9, 1025, dtype)
            _triton.project_ = whole
            assert "allowed" in found, f"{broken.__name__} was not seen with {dtype}"
    stage_two.sum_chunks = lambda partials: sound(partials[1:].contiguous())
    found = error(agreement.separate, 9, 777, torch.float32)
    stage_two.sum_chunks = sound
    assert "coefficients" in found, "a forgotten chunk was not seen"


def repeatable(_device):
    """Programs write their own partial sums, so the order in which they run changes nothing."""
    import triton.runtime.interpreter as interpreter
    from curvlab_kernels import _triton
    from curvlab_kernels.audit.agreement import basis, random

    rows, _ = basis(17, 1025, torch.float32)
    results = []
    place = interpreter.InterpreterBuilder.set_grid_idx
    for backwards in (False, True):

        def index(self, x, y, z, backwards=backwards):
            place(self, self.grid_dim[0] - 1 - x if backwards else x, y, z)

        interpreter.InterpreterBuilder.set_grid_idx = index
        vector = random(1025, seed=2, dtype=torch.float32)
        results.append((_triton.project_(rows, vector), vector))
        vector = random(1025, seed=3, dtype=torch.float32)
        results[-1] += (*_triton.orthonormalise_(rows, vector), vector)
    interpreter.InterpreterBuilder.set_grid_idx = place
    for forwards, reverse in zip(*results, strict=True):
        assert torch.equal(forwards, reverse)


def gpu_check_itself(device):
    """What of the GPU check can run here does: its own code has no other test without a GPU."""
    from curvlab_kernels.audit import gpu_checks

    gpu_checks.repeatable(300, 3, torch.int8, device)
    gpu_checks.accuracy(300, 3, device)
    gpu_checks.moving_tensors(device, n=300, steps=3)


def expanded_gradients(_device):
    """A gradient that is one number in memory, beside a parameter with strides."""
    from curvlab_kernels import _triton, reference
    from curvlab_kernels.audit.agreement import basis, random

    rows, _ = basis(5, 600, torch.float32)
    weight, change, number = (random(600, seed=i, dtype=torch.float32) for i in range(3))
    results = []
    for step in (_triton.sgd_step_, reference.sgd_step_):
        parameter, momentum = weight.clone().view(20, 30).T, change.clone().view(30, 20)
        slope = number[:1].expand(30, 20)
        step(rows, [parameter], [slope], [momentum], 0.1, 0.01, 0.9)
        results.append((parameter, momentum))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


EXTRA = {
    "expanded-gradients": expanded_gradients,
    "columns-beyond-32-bits": columns_beyond_32_bits,
    "bytes-read": bytes_read,
    "broken-kernels-are-seen": broken_kernels_are_seen,
    "order-of-programs": repeatable,
    "gpu-check-itself": gpu_check_itself,
}


@pytest.mark.parametrize("name", check_names())
def test_a_kernel_agrees_with_the_reference_in_the_interpreter(name, outcomes):
    assert name in outcomes, f"the process died before this check:\n{outcomes['died']}"
    assert not outcomes[name], outcomes[name]


def test_no_kernel_asks_whether_it_is_interpreted():
    from curvlab_kernels import _triton

    for path in Path(_triton.__file__).parent.glob("*.py"):
        assert "interpret" not in path.read_text().lower(), path.name


def test_the_package_and_its_reference_do_not_import_triton():
    modules = "curvlab_kernels, curvlab_kernels.reference, curvlab_kernels.ops"
    code = f"import sys, {modules}; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def run(names: list[str]) -> None:
    """In a process of its own: run checks and print a line of JSON for each."""
    import triton.runtime.interpreter as interpreter
    from curvlab_kernels.audit.agreement import checks

    # Arguments are on the host already; and patching the language once per module is enough, where
    # the interpreter does it at every call of a function.
    interpreter.GridExecutor._init_args_hst = lambda _, args, kwargs: (args, kwargs)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    patch, done = interpreter._patch_lang, {}

    def patch_once(function):
        scope = done.setdefault(id(function.__globals__), None)
        if scope is None:
            done[id(function.__globals__)] = scope = patch(function)
            scope.restore = lambda: None
        return scope

    interpreter._patch_lang = patch_once
    torch.use_deterministic_algorithms(True)  # which also fills torch.empty with NaN
    known = {check.name: check.run for check in checks()} | EXTRA
    for name in names:
        error, begun = "", time.process_time()
        try:
            known[name](torch.device("cpu"))
        except Exception:
            error = traceback.format_exc()[-4000:]
        seconds = time.process_time() - begun
        print(json.dumps({"name": name, "error": error, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    run(sys.argv[1:])
