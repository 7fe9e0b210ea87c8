"""The PTX interpreter's global and local memory as a sanitizer's: bounds, races, atomics."""

import numpy as np
import pytest
from curvlab_kernels.audit.ptx.report import Fault
from curvlab_kernels.audit.ptx.scheduler import TURNS

from tests.ptx_snippets import STORE, finding, numbers, run

# Global memory


def test_vectors_of_every_width_are_loaded_and_stored():
    for bits, count in ((8, 2), (8, 4), (16, 4), (32, 2), (32, 4), (64, 2), (32, 8), (64, 4)):
        registers = ", ".join(f"%{'d' if bits == 64 else 'r'}{i}" for i in range(count))
        size = bits * count // 8
        source = np.zeros(32 * size + 32, np.uint8)
        start = -source.ctypes.data % 32  # a vector is aligned to its size
        source = source[start : start + 32 * size]
        source[:] = np.random.default_rng(0).integers(0, 256, source.size)
        target = np.zeros(32 * size + 32, np.uint8)
        target = target[-target.ctypes.data % 32 :][: 32 * size]
        run(
            f"mad.wide.u32 %w0, %t, {size}, %a0; mad.wide.u32 %w1, %t, {size}, %a1;"
            f"ld.global.v{count}.b{bits} {{{registers}}}, [%w0];"
            f"st.global.v{count}.b{bits} [%w1], {{{registers}}};",
            source,
            target,
        )
        assert np.array_equal(source, target), (bits, count)


def test_a_signed_byte_is_extended_and_an_unsigned_one_is_not():
    source, out = np.full(32, 0x80, np.uint8), numbers()
    load = "cvt.u64.u32 %d0, %t; add.s64 %d1, %a1, %d0; ld.global.{}8 %r1, [%d1];" + STORE
    run(load.format("s"), out, source)
    assert (out == 0xFFFFFF80).all()
    run(load.format("u"), out, source)
    assert (out == 0x80).all()


def test_an_access_past_the_end_is_found_with_its_distance():
    with pytest.raises(
        Fault, match=r"1 threads, the first at .*, 0 bytes past the end of a tensor"
    ):
        run("mov.u32 %r1, 1;" + STORE, numbers(31))


def test_an_access_before_the_start_is_found():
    body = "mov.u32 %r1, 1; mad.wide.u32 %w0, %t, 4, %a0; st.global.b32 [%w0 + -4], %r1;"
    with pytest.raises(Fault, match="out of bounds"):
        run(body, numbers())


def test_a_guard_keeps_an_access_inside():
    out = np.zeros(31, np.uint32)
    run(
        "setp.lt.u32 %p1, %t, 31; mad.wide.u32 %w0, %t, 4, %a0;"
        "mov.u32 %r1, 5; @%p1 st.global.b32 [%w0], %r1;",
        out,
    )
    assert (out == 5).all()


def test_a_misaligned_vector_is_found():
    with pytest.raises(Fault, match="8 bytes is not aligned: 16 threads"):
        run("mad.wide.u32 %w0, %t, 4, %a0; ld.global.v2.b32 {%r1, %r2}, [%w0];", numbers(34))


def test_two_threads_that_write_one_address_race():
    out = numbers(1)
    report = run("st.global.b32 [%a0], %t;", out)
    assert "two threads write one address" in finding(report)


def test_the_same_value_from_every_thread_is_no_race():
    out = numbers(1)
    assert not run("mov.u32 %r1, 9; st.global.b32 [%a0], %r1;", out, blocks=3).findings
    assert out[0] == 9


def test_halves_of_one_word_are_two_addresses():
    out = np.zeros(32, np.uint16)
    body = "mad.wide.u32 %w0, %t, 2, %a0; cvt.u16.u32 %h1, %t; st.global.b16 [%w0], %h1;"
    assert not run(body, out).findings
    assert out.tolist() == list(range(32))


NEIGHBOUR = """
    xor.b32 %r2, %t, 32;
    mad.wide.u32 %w0, %t, 4, %a0; mad.wide.u32 %w1, %r2, 4, %a0;
    st.global.b32 [%w0], %t;
    {barrier}
    ld.global.b32 %r1, [%w1];
    mad.wide.u32 %w2, %t, 4, %a1; st.global.b32 [%w2], %r1;
"""


def test_a_barrier_orders_global_accesses_of_one_block():
    memory, out = numbers(64), numbers(64)
    report = run(NEIGHBOUR.format(barrier=""), memory, out, threads=64)
    assert "race in global memory with 'st.global.b32" in finding(report)
    report = run(NEIGHBOUR.format(barrier="bar.sync 0;"), memory, out, threads=64)
    assert not report.findings
    assert out.tolist() == [i ^ 32 for i in range(64)]


def test_a_barrier_orders_nothing_between_blocks():
    body = """
        mov.u32 %r3, %ctaid.x; setp.eq.u32 %p1, %r3, 0;
        @%p1 st.global.b32 [%a0], %r3;
        bar.sync 0;
        @!%p1 ld.global.b32 %r1, [%a0];
    """
    report = run(body, numbers(1), blocks=2)
    assert "race in global memory with" in finding(report)
    # Also when the blocks do not run side by side.
    assert run(body, numbers(1), blocks=2, lanes=32).findings == report.findings


def test_atomics_add_up_and_race_with_plain_accesses_only():
    total = np.zeros(1, np.uint32)
    assert not run("atom.global.add.u32 %r1, [%a0], %t;", total, blocks=3).findings
    assert total[0] == 3 * sum(range(32))
    report = run("red.global.add.u32 [%a0], %t; ld.global.b32 %r1, [%a0];", total)
    assert "race in global memory" in finding(report)


# Every block writes its part, counts itself, and the last one adds up all parts.
LAST_BLOCK = """
    mov.u32 %r3, %ctaid.x; add.u32 %r4, %r3, 5; setp.eq.u32 %p1, %t, {thread};
    mad.wide.u32 %w0, %r3, 4, %a0;
    @%p1 st.global.b32 [%w0], %r4;
    {barrier}
    mov.u32 %r6, buffer; setp.eq.u32 %p3, %t, 0;
    @%p3 atom.global.gpu.{order}.add.u32 %r5, [%a1], 1;
    @%p3 st.shared.b32 [%r6], %r5;
    bar.sync 0;
    ld.shared.b32 %r5, [%r6];
    setp.ne.u32 %p2, %r5, {last}; @%p2 bra END;
    ld.global.b32 %r7, [%a0]; ld.global.b32 %r8, [%a0+4]; ld.global.b32 %r9, [%a0+8];
    add.u32 %r7, %r7, %r8; add.u32 %r7, %r7, %r9; st.global.b32 [%a2], %r7;
    {reset}
    END:
"""


def last_block(thread=0, barrier="bar.sync 0;", order="acq_rel", last=2, reset="", **options):
    parts, count, total = numbers(3), np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    text = LAST_BLOCK.format(thread=thread, barrier=barrier, order=order, last=last, reset=reset)
    options = {"threads": 64, "blocks": 3, "shared": 16} | options
    return run(text, parts, count, total, **options), int(total[0]), int(count[0])


def raced(report):
    assert report.findings
    assert all("race in global memory with '@%p1 st" in each for each in report.findings)


@pytest.mark.parametrize("lanes", [64, 1024], ids=["one by one", "side by side"])
@pytest.mark.parametrize("turns", [np.asarray, *TURNS.values()], ids=["ascending", *TURNS])
def test_what_the_last_block_reads_was_handed_on_by_its_counter(lanes, turns):
    report, total, _ = last_block(lanes=lanes, turns=turns)
    assert not report.findings
    assert total == 18
    report, _, count = last_block(lanes=lanes, reset="mov.u32 %r1, 0; st.global.b32 [%a1], %r1;")
    assert not report.findings  # the counter's plain store comes after all atomics
    assert count == 0
    # Without a barrier only what the counting thread wrote is handed on.
    assert not last_block(lanes=lanes, barrier="")[0].findings
    raced(last_block(lanes=lanes, barrier="", thread=40)[0])


@pytest.mark.parametrize("change", [{"order": "relaxed"}, {"last": 1}, {"order": "acquire"}])
def test_a_counter_that_hands_on_nothing_or_too_early_is_a_race(change):
    raced(last_block(**change)[0])


def test_a_counter_of_one_block_orders_no_others():
    text = LAST_BLOCK.replace(".gpu.", ".cta.")
    text = text.format(thread=0, barrier="bar.sync 0;", order="acq_rel", last=2, reset="")
    arrays = numbers(3), np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    raced(run(text, *arrays, threads=64, blocks=3, shared=16))


def test_atomics_return_what_was_there():
    count, out = np.zeros(1, np.uint32), numbers()
    run("mov.u32 %r2, 1; atom.global.add.u32 %r1, [%a1], %r2;" + STORE, out, count)
    assert sorted(out) == list(range(32))
    lock = np.zeros(1, np.uint32)
    run("add.u32 %r2, %t, 1; atom.global.cas.b32 %r1, [%a1], 0, %r2;" + STORE, out, lock)
    assert lock[0] == 1
    assert out.tolist() == [0] + [1] * 31


@pytest.mark.parametrize(
    ("operation", "expected"), [("min", 0), ("max", 31), ("and", 0), ("or", 31), ("xor", 0)]
)
def test_other_atomics(operation, expected):
    memory = np.zeros(1, np.uint32)
    kind = "b32" if operation in ("and", "or", "xor") else "u32"
    run(f"red.global.{operation}.{kind} [%a0], %t;", memory)
    assert memory[0] == expected


def test_atomic_exchange_keeps_one_of_the_values():
    memory = np.full(1, 99, np.uint32)
    run("atom.global.exch.b32 %r1, [%a0], %t;", memory)
    assert memory[0] < 32


def test_atomics_of_half_precision_round_each_sum():
    memory, ones = np.zeros(1, np.float16), np.full(32, 0.001, np.float16)
    add = "mad.wide.u32 %w0, %t, 2, %a1; ld.global.b16 %h1, [%w0]; "
    run(add + "atom.global.add.noftz.f16 %h2, [%a0], %h1;", memory, ones)
    expected = np.float16(0)
    for each in ones:
        expected = np.float16(expected + each)
    assert memory[0] == expected
    bits, value = np.zeros(1, np.uint16), np.full(32, 0x3F80, np.uint16)  # 1 in bfloat16
    run(add + "red.global.add.noftz.bf16 [%a0], %h1;", bits, value)
    assert bits[0] == 0x4200  # 32


def test_a_volatile_load_is_a_load():
    source, out = numbers() * 3, numbers()
    run("mad.wide.u32 %w1, %t, 4, %a1; ld.volatile.global.b32 %r1, [%w1];" + STORE, out, source)
    assert np.array_equal(out, source)


# Memory of a thread


LOCAL = """
    .local .align 4 .b8 own[8]; mov.b32 %r9, own; add.u32 %r8, %t, 7;
    {store} ld.local.b32 %r1, [%r9+4];
"""


def test_each_thread_has_its_own_local_memory():
    out = numbers(128)
    body = LOCAL.format(store="st.local.b32 [%r9+4], %r8;") + STORE
    assert not run(body, out, threads=128).findings
    assert np.array_equal(out, np.arange(128) + 7)


def test_local_memory_is_checked_like_shared_memory():
    assert "read before it is written" in finding(run(LOCAL.format(store="")))
    with pytest.raises(Fault, match="out of bounds"):
        run(LOCAL.format(store="st.local.b32 [%r9+16], %r8;"))
