"""The kernels' compiled code, executed: every agreement check, from PTX, with a sanitizer's checks.

One architecture here; ``make audit`` runs all three. The mutants show what the run would notice.
"""

import pytest
import torch

pytest.importorskip("triton")
from curvlab_kernels import _triton
from curvlab_kernels.audit.agreement import basis, checks, pieces, random
from curvlab_kernels.audit.ptx import executed
from curvlab_kernels.audit.ptx.mutants import KINDS, outcomes

pytestmark = pytest.mark.aot
ARCHITECTURE = 90  # the oldest that has every storage dtype
CHECKS = {check.name: check.run for check in checks()}


@pytest.mark.parametrize("name", CHECKS)
def test_a_compiled_kernel_agrees_with_the_reference_and_races_with_nobody(name):
    with executed(ARCHITECTURE) as reports:
        CHECKS[name](torch.device("cpu"))
    assert all(sum(report.issued.values()) for report in reports)


def results(order, lanes_of_blocks):
    """Bits of a projection, a list and an orthonormalisation."""
    found = []
    with executed(ARCHITECTURE, order=order, lanes=lanes_of_blocks):
        for dtype in (torch.float32, torch.int8):
            rows, scales = basis(17, 9001, dtype)
            vector = random(9001, seed=2, dtype=torch.float32)
            found += [_triton.project_(rows, vector, None, scales), vector]
            tensors = pieces(9001, 2, torch.float32)
            found += [_triton.project_list_(rows, tensors, None, scales), *tensors]
        rows, _ = basis(40, 9001, torch.float32)
        vector = random(9001, seed=3, dtype=torch.float32)
        found += [*_triton.orthonormalise_(rows, vector), vector]
    return found


def test_the_order_of_blocks_changes_no_bit():
    ascending = results(None, 1 << 15)
    backwards = results(lambda count: reversed(range(count)), 128)
    for first, second in zip(ascending, backwards, strict=True):
        assert torch.equal(first, second)


# A few places of one kernel: `python -m curvlab_kernels.audit.ptx.mutants` breaks all of them.
@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_a_broken_kernel_is_noticed_or_gives_the_same_bits(kind):
    # programs of one warp are those of one-byte rows
    subject, every = ("project int8", 3) if kind.startswith("warp") else ("project float32", 14)
    fates = [each.fate for each in outcomes(ARCHITECTURE, [kind], every=every, only=subject)]
    assert fates
    assert "missed" not in fates
    if kind in ("barrier removed", "warp's barrier removed", "guard inverted", "shuffle mask cut"):
        assert set(fates) == {"flagged"}
