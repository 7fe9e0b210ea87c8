"""The audit of the compiled kernels: it passes on ours, and fails on kernels that are wrong."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from curvlab_kernels import _triton  # noqa: E402
from curvlab_kernels._triton.launch import Launch, recorded  # noqa: E402
from curvlab_kernels.audit import report  # noqa: E402
from curvlab_kernels.audit.address import address_errors  # noqa: E402
from curvlab_kernels.audit.cases import FAR, cases  # noqa: E402
from curvlab_kernels.audit.machine_code import accesses, addresses, compile_launch, key  # noqa: E402
from curvlab_kernels.audit.model import traffic  # noqa: E402
from curvlab_kernels.checks import check_capability  # noqa: E402

pytestmark = pytest.mark.aot
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
ROWS, COLUMNS = 3, 2**30  # 3.2e9 elements


@triton.jit(do_not_specialize=["ld", "n"])
def narrow_kernel(rows, out, ld: tl.int64, n: tl.int64, BLOCK: tl.constexpr):
    """Right, but the mask ends anywhere, so every load is scalar."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    piece = tl.load(rows + row * ld * 16 + column, mask=column < n, other=0.0)
    tl.store(out + row, tl.sum(piece, axis=0))


@triton.jit(do_not_specialize=["ld", "n"])
def wrapping_kernel(rows, out, ld, n, BLOCK: tl.constexpr):
    """The row's offset is a product of 32-bit numbers."""
    row = tl.program_id(0)
    piece = tl.load(rows + row * ld + tl.arange(0, BLOCK))
    tl.store(out + row, tl.sum(piece, axis=0) + n)


@triton.jit(do_not_specialize=["ld", "n"])
def late_kernel(rows, out, ld, n, BLOCK: tl.constexpr):
    """Extended to 64 bits after the product has wrapped."""
    row = tl.program_id(0)
    piece = tl.load(rows + (row * ld).to(tl.int64) + tl.arange(0, BLOCK))
    tl.store(out + row, tl.sum(piece, axis=0) + n)


@triton.jit(do_not_specialize=["ld", "n"])
def sound_kernel(rows, out, ld, n, BLOCK: tl.constexpr):
    """The row is extended before the product."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.load(rows + row * ld + tl.arange(0, BLOCK))
    tl.store(out + row, tl.sum(piece, axis=0) + n)


def small_launch(kernel) -> Launch:
    rows = torch.empty(ROWS, COLUMNS, device="meta")
    out = torch.empty(ROWS, device="meta")
    return Launch(kernel, ROWS, (rows, out, COLUMNS, 1000), {"BLOCK": 1024}, OPTIONS)


def projection(vector: torch.Tensor) -> Launch:
    rows = torch.empty(20, 1024, device=vector.device)
    with recorded() as launches:
        _triton.project_(rows, vector)
    return launches[0]


@pytest.mark.parametrize("kernel", [wrapping_kernel, late_kernel], ids=["wrapping", "late"])
def test_32_bit_address_arithmetic_is_found(kernel):
    launch = small_launch(kernel)
    errors = addresses(launch, compile_launch(launch, 90).ir)
    assert len(errors) >= 1
    assert "32 bits" in errors[0]


def test_64_bit_address_arithmetic_passes():
    launch = small_launch(sound_kernel)
    assert addresses(launch, compile_launch(launch, 90).ir) == []


def test_the_same_32_bit_kernel_passes_where_nothing_can_overflow():
    launch = small_launch(wrapping_kernel)
    ir = compile_launch(launch, 90).ir
    near = replace(launch, arguments=(*launch.arguments[:2], 1024, 1000))
    assert addresses(near, ir) == []


def test_an_analysis_that_found_no_address_fails():
    errors = address_errors("module {\n}", ["rows"], [None], 1)
    assert any("no address" in error for error in errors)


def test_narrow_loads_of_the_basis_are_found():
    launch = small_launch(narrow_kernel)
    errors = compile_launch(launch, 90).errors()
    assert any("narrower than 128 bits" in error for error in errors)


@triton.jit(do_not_specialize=["n"])
def narrow_vector_kernel(vectors, target, n: tl.int64, BLOCK: tl.constexpr):
    """Right, but every tile is masked column by column."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + column, tl.load(vectors + column, mask=column < n), mask=column < n)


def test_narrow_accesses_of_a_long_vector_are_found_and_those_of_a_short_one_are_not():
    long, short = (torch.empty(n, device="meta") for n in (10**6, 1000))
    for vector, kinds in ((long, ["loads of vectors", "stores of target"]), (short, [])):
        launch = Launch(narrow_vector_kernel, 1, (vector, vector, 1000), {"BLOCK": 512}, OPTIONS)
        found = compile_launch(launch, 90).narrow
        assert len(found) == len(kinds)
        assert all(text.startswith(kind) for text, kind in zip(found, kinds, strict=True))


def test_register_spills_are_found():
    launch = projection(torch.empty(1000, device="meta"))
    starved = replace(launch, options={**launch.options, "maxnreg": 32})
    errors = compile_launch(starved, 90).errors()
    assert any("registers spill" in error for error in errors)


def test_a_vector_that_is_not_aligned_leaves_the_loads_of_the_basis_wide():
    aligned = projection(torch.empty(1000))
    shifted = projection(torch.empty(1001)[1:])
    assert key(aligned) != key(shifted)
    code = compile_launch(shifted, 80)
    assert set(code.basis_loads) == {128}
    assert code.errors() == []


def test_loads_are_followed_from_their_parameter_only():
    ptx = """
        ld.param.b64 %rd1, [k_param_0];
        ld.param.b64 %rd2, [k_param_1];
        mad.wide.s32 %rd3, %r1, 4, %rd1;
        add.s64 %rd4, %rd2, 8;
        @%p1 ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd3 + 0 ];
        ld.global.b32 { %r6 }, [ %rd4 + 0 ];
        ld.global.b64 { %rd7 }, [ %rd1 + 8 ];
        ld.global.b32 { %r9 }, [ %rd7 + 0 ];
        cp.async.cg.shared.global [ %r8 + 0 ], [ %rd3 + 0 ], 0x10, %r7;
    """
    assert accesses(ptx, 0) == {128: 2, 64: 1}
    assert accesses(ptx, 1) == {32: 1}


def test_every_kernel_is_audited_beyond_32_bits():
    sources = Path(_triton.__file__).parent.glob("*.py")
    written = {
        line.removeprefix("def ").split("(")[0]
        for source in sources
        for line in source.read_text().splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    }
    audited = set()
    for case in cases():
        far = {key(launch) for launch in case.launches(far=True)}
        for launch in case.launches():
            audited.add(launch.kernel.__name__)
            assert key(launch) in far, f"{case.name}: {launch.kernel.__name__} has no far launch"
    assert audited == written
    assert FAR > 2**32


def test_the_model_gives_a_projection_its_bytes():
    n, m = 12_400_003, 20
    project = next(case for case in cases(n, m) if case.name == "project")
    moved = sum(traffic(launch).total() for launch in project.launches())
    assert project.minimum_bytes() == 2 * n * m * 4 + 12 * n
    assert 1.0 <= moved / project.minimum_bytes() < 1.01


def test_the_quick_audit_passes(capsys):
    assert report.main(["--quick", "--arch", "80", "90", "100"]) == 0
    printed = capsys.readouterr().out
    assert "0 failed" in printed
    assert "sm_100" in printed


def test_a_failure_is_counted_and_explained(capsys, monkeypatch):
    monkeypatch.setattr(report, "_FAR_ENOUGH", 2**60)
    arguments = ["--quick", "--arch", "90", "--only", "project"]
    assert report.main(arguments) > 0
    assert "FAIL partials_kernel sm_90" in capsys.readouterr().out


@pytest.mark.slow
def test_the_whole_audit_passes(capsys):
    assert report.main([]) == 0
    assert "0 failed" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_float8_rows_compile_with_float64_vectors(dtype):
    (case,) = (c for c in cases(5000, 9, (dtype,)) if c.name == "project, float64 vectors")
    for launch in case.launches():
        assert compile_launch(launch, 90).errors() == []


def test_a_dtype_that_a_gpu_lacks_is_refused_by_name():
    with pytest.raises(TypeError, match=r"float8_e4m3fn needs .* 8\.9; this one has 8\.0"):
        check_capability(torch.float8_e4m3fn, (8, 0))
    check_capability(torch.float8_e4m3fn, (8, 9))
    check_capability(torch.float8_e5m2, (8, 0))
    assert not report.available(torch.float8_e4m3fn, 80)
    assert report.available(torch.float8_e4m3fn, 100)
