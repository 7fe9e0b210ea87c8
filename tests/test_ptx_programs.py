"""The PTX interpreter's programs: what is refused, scopes, loops, and what never ends."""

import numpy as np
import pytest
from curvlab_kernels.audit.ptx.instructions import TABLE
from curvlab_kernels.audit.ptx.memory import GlobalMemory
from curvlab_kernels.audit.ptx.program import UnknownInstruction, parse
from curvlab_kernels.audit.ptx.report import Fault
from curvlab_kernels.audit.ptx.scheduler import Executable

from tests.ptx_snippets import LANES, STORE, program, run
from tests.test_ptx_floats import FLOAT_CASES
from tests.test_ptx_integers import INTEGER_CASES


def test_every_mnemonic_of_the_table_is_tested_with_numbers_or_with_memories():
    here = {text.split(".")[0].split()[0] for text, _, _ in INTEGER_CASES.values()}
    here |= {"setp", "selp", "cvt", "set", *FLOAT_CASES, "min", "max"}
    here |= {"copysign", "sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh"}
    memories = {
        "mov",
        "ld",
        "st",
        "ldmatrix",
        "stmatrix",
        "shfl",
        "bar",
        "redux",
        "trap",
        "atom",
        "red",
        "madc",
        "shf",
        "cp",
        "createpolicy",
        "mma",
    }
    assert here | memories == set(TABLE)


@pytest.mark.parametrize(
    "text",
    [
        "wgmma.fence.sync.aligned;",
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d1, %d2}, {%d3}, {%d4}, {%d1, %d2};",
        "cp.async.bulk.commit_group;",
        "add.sat.s32 %r1, %r2, %r3;",
        "add.rm.f32 %r1, %r2, %r3;",
        "mul.rz.f32 %r1, %r2, %r3;",
        "fma.rz.f64 %d1, %d2, %d3, %d4;",
        "fma.rm.f32 %r1, %r2, %r3, %r4;",
        "mul.wide.s64 %d1, %d2, %d3;",
        "ld.const.b32 %r1, [%d1];",
        "mad.hi.cc.u32 %r1, %r2, %r3, %r4;",
        "madc.lo.u32 %r1, %r2, %r3, %r4;",
        "shf.l.clamp.b32 %r1, %r2, %r3, %r4;",
        "atom.global.max.noftz.bf16 %h1, [%a0], %h2;",
        "atom.local.add.u32 %r1, [%d1], %r2;",
        "ld.global.v3.b32 {%r1, %r2, %r3}, [%a0];",
        "setp.lt.s32 %p1|%p2, %r1, %r2;",
        "cvt.rna.tf32.f32 %r1, %r2;",
        "bar.sync 1, 64;",
        "bar.arrive 0, 64;",
        "shfl.down.b32 %r1, %r2, 1, 31;",
        "call foo;",
        "mov.u32 %r1, %clock;",
        "mov.u64 %d1, foo;",
        ".local .b8 stack[16];",
    ],
)
def test_what_is_not_known_is_refused_and_never_skipped(text):
    with pytest.raises(UnknownInstruction):
        Executable(parse(program(text, 1)))


def test_a_kernel_that_does_not_end_is_an_error_with_its_place():
    forever = "LOOP: add.u32 %r1, %r1, 1; setp.ne.u32 %p1, %t, 5; @%p1 bra DONE; bra LOOP; DONE:"
    with pytest.raises(
        Fault, match=r"k does not end: thread 5 of block 0 has taken 1,00\d instr.*limit="
    ):
        run(forever, limit=1000)
    long = "mov.u32 %r1, 0; LOOP: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 400; @%p1 bra LOOP;"
    assert not run(long, limit=1300).findings
    with pytest.raises(Fault, match="does not end"):
        run(long, limit=1200)


def test_an_undeclared_register_and_a_missing_label_are_errors():
    for text in ("add.s32 %r1, %zz, 1;", "add.s32 %zz, %r1, 1;"):
        with pytest.raises(UnknownInstruction, match=r"register.*zz|zz.*register"):
            Executable(parse(program(text, 1)))
    with pytest.raises(ValueError, match="no such label"):
        parse(program("bra NOWHERE;", 1))


def test_an_error_shows_registers_of_an_inner_scope_as_they_were_written():
    with pytest.raises(UnknownInstruction, match=r"'@%p1 bar\.sync 0' is no barrier"):
        Executable(parse(program("{ .reg .pred %p1; @%p1 bar.sync 0; }", 1)))


def test_a_register_holds_nan_until_its_lane_has_written_it():
    out = np.zeros(LANES, np.uint32)
    run(f"setp.lt.u32 %p1, %t, 5; @%p1 mov.u32 %r1, 7; {STORE}", out)
    assert out.tolist() == [7] * 5 + [2**32 - 1] * 27


def test_registers_of_an_inner_scope_hide_the_outer_ones():
    out = np.zeros(LANES, np.uint32)
    body = """
        mov.u32 %r1, 7;
        {
        .reg .b32 %r1, x<2>;
        mov.u32 %r1, 100; mov.u32 x1, 1; add.u32 x1, x1, %r1; mov.u32 %r2, x1;
        }
        add.u32 %r1, %r1, %r2;
        mad.wide.u32 %w0, %t, 4, %a0;
        st.global.b32 [%w0], %r1;
    """
    run(body, out)
    assert (out == 108).all()


def test_loops_run_as_often_as_each_lane_needs():
    out = np.zeros(64, np.uint32)
    body = """
        mov.u32 %r1, 0; mov.u32 %r2, 0;
        LOOP: setp.ge.u32 %p1, %r1, %t;
        @%p1 bra DONE;
        add.u32 %r2, %r2, %r1; add.u32 %r1, %r1, 1;
        bra.uni LOOP;
        DONE: mad.wide.u32 %w0, %t, 4, %a0;
        st.global.b32 [%w0], %r2;
    """
    report = run(body, out, threads=64)
    assert out.tolist() == [i * (i - 1) // 2 for i in range(64)]
    # A warp goes round until its last lane is done: 31 and 63 times.
    assert report.issued["bra.uni"] == 31 + 63


def test_a_program_without_an_end_is_an_error():
    text = program("mov.u32 %r1, 0;", 1).replace("ret;", "")
    with pytest.raises(Fault, match="past its last instruction"):
        Executable(parse(text)).run((1, 1, 1), [0], GlobalMemory([]))
