"""The PTX interpreter's shared memory, barriers, shuffles and matrices, with known outcomes."""

import numpy as np
import pytest
from curvlab_kernels.audit.ptx.report import Fault

from tests.ptx_snippets import STORE, finding, numbers, run

# Shared memory


COUNT = """
    mov.u32 %r9, buffer; and.b32 %r8, %t, 3; shl.b32 %r8, %r8, 2; add.u32 %r7, %r9, %r8;
    setp.lt.u32 %p1, %t, 4; {first} st.shared.b32 [%r7], 0; bar.sync 0;
    atom.shared.add.u32 %r2, [%r7], 1; {second} ld.shared.b32 %r1, [%r7];
"""


def test_atomics_in_shared_memory_add_up_and_race_with_plain_accesses_only():
    out = numbers(64)
    body = COUNT.format(first="@%p1", second="bar.sync 0;") + STORE
    assert not run(body, out, threads=64).findings
    assert (out == 16).all()
    report = run(COUNT.format(first="@%p1", second=""), threads=64)
    assert "race in shared memory: read after write" in finding(report)
    (text, *_) = run(
        COUNT.format(first="@!%p1", second="bar.sync 0;").replace("bar.sync 0;", "", 1), threads=64
    ).findings
    assert "race in shared memory" in text


def stored_at_one_address(bits, threads=32):
    """Every thread stores its number of ``bits`` at one address of shared memory."""
    body = "mov.u32 %r9, buffer; mad.wide.u32 %w0, %t, 4, %a0; ld.global.b32 %r1, [%w0];"
    return run(body + "st.shared.b32 [%r9], %r1;", bits, threads=threads)


def test_sums_of_one_warp_that_round_otherwise_are_told_and_no_fault():
    value = np.full(32, 1.5, np.float32).view(np.uint32)
    value[7] += 3
    report = stored_at_one_address(value)
    assert not report.findings
    assert sum(report.rounding.values()) == 1


def test_other_values_at_one_address_are_a_fault():
    what = "two threads store different values at one address"
    assert what in finding(stored_at_one_address(numbers()))
    value = np.full(64, 1.5, np.float32).view(np.uint32)
    value[:32] += 3  # one warp's: two warps are in no order
    assert what in finding(stored_at_one_address(value, threads=64))
    value = np.full(32, 1.5, np.float32).view(np.uint32)
    value[7] += 100
    assert what in finding(stored_at_one_address(value))
    assert what in finding(stored_at_one_address(numbers() + 1_000_000))


# Exchanges


EXCHANGE = """
    mov.u32 %r9, buffer; shl.b32 %r8, %t, 2; add.u32 %r7, %r9, %r8;
    xor.b32 %r6, %r8, {distance}; add.u32 %r6, %r9, %r6;
    st.shared.b32 [%r7], %t;
    {barrier}
    ld.shared.b32 %r1, [%r6];
    {after}
"""


@pytest.mark.parametrize("distance", [4, 128], ids=["within a warp", "between warps"])
def test_a_missing_barrier_is_a_race(distance):
    out = numbers(64)
    body = EXCHANGE.format(distance=distance, barrier="", after=STORE)
    report = run(body, out, threads=64, shared=256)
    assert "race in shared memory: read after write" in finding(report)
    body = EXCHANGE.format(distance=distance, barrier="bar.sync 0;", after=STORE)
    assert not run(body, out, threads=64, shared=256).findings
    assert out.tolist() == [i ^ (distance // 4) for i in range(64)]


def test_a_barrier_of_the_warp_orders_its_lanes_only():
    for distance, clean in ((4, True), (128, False)):
        body = EXCHANGE.format(distance=distance, barrier="bar.warp.sync -1;", after="")
        report = run(body, numbers(1), threads=64, shared=256)
        assert (not report.findings) == clean


def test_a_barrier_of_the_warp_orders_only_what_came_before_it():
    after = "{} mov.u32 %r1, 77; st.shared.b32 [%r7], %r1;"
    for barrier, clean in (("", False), ("bar.warp.sync -1;", True), ("bar.sync 0;", True)):
        body = EXCHANGE.format(distance=4, barrier="bar.warp.sync -1;", after=after.format(barrier))
        report = run(body, numbers(1), threads=64, shared=256)
        assert (not report.findings) == clean


def test_writing_what_others_may_still_read_is_a_race():
    after = "{} mov.u32 %r1, 77; st.shared.b32 [%r7], %r1;"
    for barrier, clean in (("", False), ("bar.sync 0;", True)):
        body = EXCHANGE.format(distance=4, barrier="bar.sync 0;", after=after.format(barrier))
        report = run(body, numbers(1), threads=64, shared=256)
        assert (not report.findings) == clean
        assert clean or "write after read" in finding(report)


def test_a_write_over_anothers_write_is_a_race():
    body = """
        mov.u32 %r9, buffer; shl.b32 %r8, %t, 2; add.u32 %r7, %r9, %r8; st.shared.b32 [%r7], %t;
        xor.b32 %r6, %r8, 4; add.u32 %r6, %r9, %r6; st.shared.b32 [%r6], %t;
    """
    assert "write after write" in finding(run(body, numbers(1), shared=256))


def test_different_values_at_one_address_are_found_and_equal_ones_are_not():
    body = "mov.u32 %r9, buffer; mov.u32 %r8, 3; st.shared.b32 [%r9], {};"
    report = run(body.format("%t"), numbers(1), shared=16)
    assert "different values at one address" in finding(report)
    assert not run(body.format("%r8"), numbers(1), shared=16, threads=64).findings


def test_shared_memory_must_be_written_before_it_is_read():
    body = "mov.u32 %r9, buffer; ld.shared.b32 %r1, [%r9];" + STORE
    out = numbers()
    assert "read before it is written" in finding(run(body, out, shared=16))
    assert (out == 0xFFFFFFFF).all()  # NaN to a float


def test_shared_accesses_stay_inside_and_aligned():
    with pytest.raises(Fault, match="shared access out of bounds: byte 124 of 64"):
        run(EXCHANGE.format(distance=4, barrier="", after=""), numbers(1), shared=64)
    with pytest.raises(Fault, match="shared access out of bounds"):
        run("mov.u32 %r9, 0; st.shared.b32 [%r9], %t;", numbers(1), shared=64)
    with pytest.raises(Fault, match="is not aligned"):
        run("mov.u32 %r9, buffer; st.shared.b64 [%r9+4], %a0;", numbers(1), shared=64)


def test_blocks_do_not_share_shared_memory():
    body = "mov.u32 %r9, buffer; mov.u32 %r2, %ctaid.x; st.shared.b32 [%r9], %r2; bar.sync 0;"
    body += "ld.shared.b32 %r1, [%r9]; mad.wide.u32 %w0, %r2, 4, %a0; st.global.b32 [%w0], %r1;"
    out = numbers(7)[::-1].copy()
    assert not run(body, out, blocks=7, shared=16).findings
    assert out.tolist() == list(range(7))


@pytest.mark.parametrize("crossed", ["", ".trans"])
def test_matrices_through_shared_memory_are_laid_out_as_documented(crossed):
    """stmatrix then ldmatrix return the registers; what lies between is the matrix."""
    out = np.zeros(64, np.uint16)
    body = f"""
        mov.u32 %r9, buffer; and.b32 %r8, %t, 7; mad.lo.u32 %r7, %r8, 16, %r9;
        shl.b32 %r6, %t, 1; add.u32 %r5, %r6, 1; shl.b32 %r5, %r5, 16; or.b32 %r4, %r5, %r6;
        stmatrix.sync.aligned.m8n8.x1{crossed}.shared.b16 [%r7], {{%r4}};
        bar.sync 0;
        shl.b32 %r3, %t, 2; add.u32 %r2, %r9, %r3; ld.shared.b32 %r1, [%r2];
        {STORE}
        ldmatrix.sync.aligned.m8n8.x1{crossed}.shared.b16 {{%r10}}, [%r7];
        setp.ne.b32 %p1, %r10, %r4; @%p1 st.global.b32 [%a0 + -4], %r10;
    """
    assert not run(body, out.view(np.uint32), shared=128).findings
    # Lane l holds elements (l / 4, 2 (l % 4)) and the next: numbered along the rows.
    matrix = out.reshape(8, 8)
    assert np.array_equal(matrix.T if crossed else matrix, np.arange(64).reshape(8, 8))


# Barriers and shuffles


def test_a_barrier_that_some_threads_never_reach_is_found():
    body = "setp.lt.u32 %p1, %t, 32; @%p1 bra SKIP; bar.sync 0; SKIP: mov.u32 %r1, 0;"
    with pytest.raises(Fault, match=r"barrier divergence in 1 blocks.*have ended"):
        run(body, numbers(1), threads=64)


def test_threads_at_two_barriers_are_found():
    body = (
        "setp.lt.u32 %p1, %t, 32; @%p1 bra A; bar.sync 0; bra B; A: bar.sync 0; B: mov.u32 %r1, 0;"
    )
    with pytest.raises(Fault, match=r"barrier divergence.*another one"):
        run(body, numbers(1), threads=64)


def test_blocks_may_pass_a_different_number_of_barriers():
    body = """
        mov.u32 %r2, %ctaid.x; mov.u32 %r1, 0;
        LOOP: setp.ge.u32 %p1, %r1, %r2; @%p1 bra END;
        bar.sync 0; add.u32 %r1, %r1, 1; bra LOOP;
        END: bar.sync 0;
    """
    report = run(body, numbers(1), blocks=5, threads=64)
    assert report.barriers == 5 + sum(range(5))
    assert report.issued["bar.sync"] == 2 * report.barriers  # two warps


@pytest.mark.parametrize(
    ("mode", "by", "clamp", "source"),
    [
        ("bfly", 5, 31, lambda i: i ^ 5),
        ("idx", 7, 31, lambda _: 7),
        ("down", 3, 31, lambda i: i + 3 if i + 3 < 32 else i),
        ("up", 3, 0, lambda i: i - 3 if i >= 3 else i),
        ("down", 3, 0x181F, lambda i: i + 3 if i % 8 < 5 else i),
        ("idx", 2, 0x181F, lambda i: i // 8 * 8 + 2),
    ],
)
def test_shuffles_take_the_documented_lane(mode, by, clamp, source):
    out = numbers(64)
    body = f"shfl.sync.{mode}.b32 %r1|%p1, %t, {by}, {clamp}, -1; {STORE}"
    run(body, out, threads=64)
    assert out.tolist() == [i // 32 * 32 + source(i % 32) for i in range(64)]


def test_a_shuffle_with_a_part_of_its_warp_is_found():
    body = "setp.lt.u32 %p1, %t, 16; @%p1 shfl.sync.bfly.b32 %r1, %t, 1, 31, {};"
    with pytest.raises(Fault, match="execute an instruction for lanes 0xffffffff"):
        run(body.format("-1"), numbers(1))
    assert not run(body.format("0xffff"), numbers(1)).findings


def test_a_shuffle_from_a_lane_that_is_away_is_found():
    body = "setp.lt.u32 %p1, %t, 16; @%p1 shfl.sync.bfly.b32 %r1, %t, 16, 31, 0xffff;"
    with pytest.raises(Fault, match="does not take part is read"):
        run(body, numbers(1))


def test_a_reduction_gives_every_lane_its_warps_total():
    out = numbers(64)
    run("redux.sync.add.u32 %r1, %t, -1;" + STORE, out, threads=64)
    assert out.tolist() == [sum(range(32))] * 32 + [sum(range(32, 64))] * 32


def test_of_floats_the_largest_is_found_and_nan_loses_or_wins():
    out = np.zeros(32, np.float32)
    body = "cvt.rn.f32.u32 %r2, %t; setp.eq.u32 %p1, %t, 5; @%p1 mov.b32 %r2, 0f7FC00000;"
    run(body + "redux.sync.max.f32 %r1, %r2, -1;" + STORE, out)
    assert out.tolist() == [31.0] * 32
    run(body + "redux.sync.min.NaN.f32 %r1, %r2, -1;" + STORE, out)
    assert np.isnan(out).all()


def test_of_zeros_in_a_warp_the_positive_one_is_largest():
    out = np.zeros(32, np.uint32)
    body = "setp.eq.u32 %p1, %t, 5; mov.b32 %r2, 0f80000000; @%p1 mov.b32 %r2, 0f00000000;"
    run(body + "redux.sync.max.f32 %r1, %r2, -1;" + STORE, out)
    assert (out == 0).all()
    run(body + "redux.sync.min.f32 %r1, %r2, -1;" + STORE, out)
    assert (out == 0x80000000).all()


# Rows or columns of element i of a lane's registers, as the PTX manual lists them.
MULTIPLY = {
    "f16": (16, np.float16, lambda t, i: 2 * t + i % 2 + 8 * (i // 4), lambda i: i // 2 % 2),
    "tf32": (8, np.float32, lambda t, i: t + 4 * (i // 2), lambda i: i % 2),
    "s8": (32, np.int8, lambda t, i: 4 * t + i % 4 + 16 * (i // 8), lambda i: i // 4 % 2),
}


@pytest.mark.parametrize("kind", MULTIPLY)
def test_matrices_are_multiplied_as_documented(kind):
    k, dtype, along, half = MULTIPLY[kind]
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-9, 9, shape) for shape in ((16, k), (k, 8), (16, 8)))
    sums = np.int32 if kind == "s8" else np.float32
    size = np.dtype(dtype).itemsize
    lefts, rights, starts = (
        np.zeros((32, n), t) for n, t in ((16 // size, dtype), (8 // size, dtype), (4, sums))
    )
    for lane in range(32):
        group, t = divmod(lane, 4)
        for i in range(16 // size):
            lefts[lane, i] = a[group + 8 * half(i), along(t, i)]
        for i in range(8 // size):
            per = 4 // size  # of b a register has no other rows between
            rights[lane, i] = b[along(t, i % per + 2 * per * (i // per)), group]
        for i in range(4):
            starts[lane, i] = c[group + 8 * (i // 2), 2 * t + i % 2]
    out = np.zeros((32, 4), sums)
    result = "s32" if kind == "s8" else "f32"
    body = f"""
        mad.wide.u32 %w0, %t, 16, %a0; mad.wide.u32 %w1, %t, 8, %a1; mad.wide.u32 %w2, %t, 16, %a2;
        mad.wide.u32 %w3, %t, 16, %a3;
        ld.global.v2.b32 {{%r0, %r1}}, [%w0]; ld.global.v2.b32 {{%r2, %r3}}, [%w0+8];
        ld.global.v2.b32 {{%r4, %r5}}, [%w1];
        ld.global.v2.b32 {{%r6, %r7}}, [%w2]; ld.global.v2.b32 {{%r8, %r9}}, [%w2+8];
        mma.sync.aligned.m16n8k{k}.row.col.{result}.{kind}.{kind}.{result}
            {{%r6, %r7, %r8, %r9}}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {{%r6, %r7, %r8, %r9}};
        st.global.v2.b32 [%w3], {{%r6, %r7}}; st.global.v2.b32 [%w3+8], {{%r8, %r9}};
    """
    run(body, *(each.view(np.uint32) for each in (lefts, rights, starts)), out.view(np.uint32))
    exact = a @ b + c
    for lane in range(32):
        group, t = divmod(lane, 4)
        assert out[lane].tolist() == [exact[group + 8 * (i // 2), 2 * t + i % 2] for i in range(4)]


@pytest.mark.parametrize(("cut", "expected"), [("", -(2**31) + 25), (".satfinite", 2**31 - 1)])
def test_sums_of_whole_products_wrap_or_saturate(cut, expected):
    """``tl.dot`` of int8 asks for the latter."""
    ones, start = np.full(4, 0x01010101, np.uint32), np.full(4, 2**31 - 7, np.uint32)
    out = np.zeros(32, np.int32)
    loads = "ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%a0]; ld.global.v4.b32 {%r4, %r5, %r6, %r7}"
    body = f"""
        {loads}, [%a1];
        mma.sync.aligned.m16n8k32.row.col{cut}.s32.s8.s8.s32
            {{%r4, %r5, %r6, %r7}}, {{%r0, %r1, %r2, %r3}}, {{%r0, %r1}}, {{%r4, %r5, %r6, %r7}};
        mad.wide.u32 %w0, %t, 4, %a2; st.global.b32 [%w0], %r4;
    """
    run(body, ones, start, out.view(np.uint32))
    assert (out == expected).all()


ASYNCHRONOUS = """
    mov.u32 %r9, buffer; mad.lo.u32 %r8, %t, 16, %r9; xor.b32 %r7, %t, 1;
    mad.lo.u32 %r6, %r7, 16, %r9; mad.wide.u32 %w1, %t, 16, %a1; mov.u32 %r5, 16;
    setp.lt.u32 %p1, %t, 30; selp.b32 %r5, 16, 0, %p1;
    cp.async.cg.shared.global [%r8], [%w1], 0x10, %r5;
    cp.async.commit_group;
    {wait}
    ld.shared.b32 %r1, [%r6 + 12];
"""


def test_an_asynchronous_copy_is_there_after_its_wait_and_a_barrier():
    source, out = np.arange(120, dtype=np.uint32), numbers()
    text = ASYNCHRONOUS + STORE
    done = "cp.async.wait_group 0; bar.sync 0;"
    assert not run(text.format(wait=done), out, source, shared=512).findings
    assert out.tolist() == [4 * (t ^ 1) + 3 if t ^ 1 < 30 else 0 for t in range(32)]
    report = run(text.format(wait="cp.async.wait_all;"), out, source, shared=512)
    assert "race in shared memory: read after write" in finding(report)
    run(text.format(wait="cp.async.wait_group 1; bar.sync 0;"), out, source, shared=512)
    assert (out == 2**32 - 1).all()  # the group is under way still
    text = ASYNCHRONOUS.replace("commit_group;", "commit_group; cp.async.commit_group;") + STORE
    run(text.format(wait="cp.async.wait_group 1; bar.sync 0;"), out, source, shared=512)
    assert out[0] == 7


def test_an_asynchronous_copy_over_what_others_may_still_read_is_a_race():
    text = ASYNCHRONOUS.replace(
        "cp.async.cg",
        "st.shared.b32 [%r8+12], %t; bar.sync 0;ld.shared.b32 %r1, [%r6+12]; cp.async.cg",
    )
    report = run(
        text.format(wait="cp.async.wait_all; bar.sync 0;"),
        numbers(),
        np.arange(120, dtype=np.uint32),
        shared=512,
    )
    assert any("write after read: 'cp.async.cg" in each for each in report.findings)


def test_a_matrix_load_by_a_part_of_a_warp_is_found():
    body = "mov.u32 %r9, buffer; setp.lt.u32 %p1, %t, 16;"
    body += "@%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r9];"
    with pytest.raises(Fault, match="only a part of a warp"):
        run(body, numbers(1), shared=128)


def test_a_trap_ends_the_execution_where_a_lane_gets_to_it():
    body = "setp.gt.u32 %p1, %t, {}; @%p1 trap;"
    assert not run(body.format(31), numbers(1)).findings
    with pytest.raises(Fault, match="trap reached"):
        run(body.format(30), numbers(1))


def test_the_counts_are_those_of_the_program():
    out = numbers(64)
    report = run("mov.u32 %r1, 1;" + STORE, out, threads=64, blocks=1)
    # A parameter, the thread's number, the constant, the address, the store, the end: two warps.
    assert sum(report.issued.values()) == 2 * 6
    assert report.bytes["global written"] == 256


def test_the_order_and_number_of_blocks_side_by_side_change_nothing():
    body = "mov.u32 %r1, %ctaid.x; mad.lo.u32 %r1, %r1, 32, %t; mad.wide.u32 %w0, %r1, 4, %a0;"
    body += "ld.global.b32 %r2, [%w0]; mul.lo.u32 %r2, %r2, 3; st.global.b32 [%w0], %r2;"
    first, second = numbers(32 * 9), numbers(32 * 9)
    run(body, first, blocks=9)
    run(body, second, blocks=9, lanes=64, order=reversed(range(9)))
    assert np.array_equal(first, 3 * numbers(32 * 9))
    assert np.array_equal(first, second)
