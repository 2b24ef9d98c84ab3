"""What the PTX emulator of `ptx/` finds: races, missing barriers and waits, and accesses outside of tensors."""

import numpy as np
import pytest
import torch

from tests.kernels.ptx.machine import Shuffled, backwards, forwards, run
from tests.kernels.ptx.memory import SHARED_BASE, Fault, Memory, Now
from tests.kernels.ptx.snippets import LANES, execute, program, words
from tests.kernels.ptx.warpgroup import Products

ORDERS = [forwards, backwards, Shuffled(1)]


STORE = "mov.b32 %r1, global_smem; shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2; add.s32 %r4, %r0, 7; st.shared.b32 [%r3], %r4;"
NEIGHBOUR = "xor.b32 %r5, %r2, 128; add.s32 %r5, %r5, %r1; ld.shared.b32 %r6, [%r5];"


@pytest.mark.parametrize("order", ORDERS)
def test_warps_exchange_numbers_through_a_barrier(order):
    (found,) = execute(f"{STORE} bar.sync 0; {NEIGHBOUR}", [], ["%r6"], warps=2, shared=256, order=order)
    assert np.array_equal(found, (np.arange(64) ^ 32) + 7)


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_barrier_is_a_fault(order):
    with pytest.raises(Fault, match=r"warp [01], line \d+ .*where nothing has stored"):
        execute(f"{STORE} {NEIGHBOUR}", [], ["%r6"], warps=2, shared=256, order=order)
    again = f"{STORE} bar.sync 0; st.shared.b32 [%r3], %r0;"
    execute(f"{again} bar.sync 0; {NEIGHBOUR}", [], ["%r6"], warps=2, shared=256, order=order)
    with pytest.raises(Fault, match=r"warp [01], line \d+ .*without a barrier"):
        execute(f"{again} {NEIGHBOUR}", [], ["%r6"], warps=2, shared=256, order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_barrier_before_memory_is_used_again_is_a_fault(order):
    again = "st.shared.b32 [%r3], %r0;"
    code = f"{STORE} bar.sync 0; {NEIGHBOUR} {{}} {again}"
    execute(code.replace("{}", "bar.sync 0;"), [], ["%r6"], warps=2, shared=256, order=order)
    with pytest.raises(Fault, match="without a barrier"):
        execute(code.replace("{}", ""), [], ["%r6"], warps=2, shared=256, order=order)


def test_warps_may_store_the_same_bits():
    same = "mov.b32 %r1, global_smem; and.b32 %r2, %r0, 31; shl.b32 %r3, %r2, 2; add.s32 %r3, %r3, %r1; st.shared.b32 [%r3], {};"
    execute(same.format("%r2"), [], [], warps=2, shared=128)
    with pytest.raises(Fault, match="without a barrier"):
        execute(same.format("%r0"), [], [], warps=2, shared=128)


def test_lanes_must_not_store_different_bits_at_one_address():
    with pytest.raises(Fault, match="different bits at one address"):
        execute("mov.b32 %r1, global_smem; st.shared.b32 [%r1], %r0;", [], [], shared=128)


def test_blocks_must_not_read_what_others_store():
    code = "mov.u32 %r5, %ctaid.x; add.s32 %r1, %r1, %r5; st.global.b32 [%rd1], %r1;"
    execute("mov.b32 %r9, 5;", [], ["%r9"], grid=(2, 1))  # both store the same bits
    with pytest.raises(Fault, match=r"block \(1, 0\).*another block"):
        execute(code, [words(1)], [], grid=(2, 1))


COPY = (
    "mov.b32 %r2, global_smem; and.b32 %r3, %r0, 7; shl.b32 %r4, %r0, 4; add.s32 %r4, %r4, %r2; "
    "ld.param.b64 %rd9, [p0]; mul.wide.u32 %rd10, %r3, 16; add.s64 %rd10, %rd10, %rd9; "
    "mov.b32 %r8, 16; setp.ge.u32 %p1, %r0, 8; @%p1 mov.b32 %r8, 0; "
    "cp.async.cg.shared.global [ %r4 + 0 ], [ %rd10 + 0 ], 0x10, %r8; cp.async.commit_group; "
)
WAIT = "cp.async.wait_group 0; "
READ = "shl.b32 %r5, %r0, 4; xor.b32 %r5, %r5, {}; add.s32 %r5, %r5, %r2; ld.shared.b32 %r6, [%r5+4];"


def test_asynchronous_copies():
    source = words(np.arange(32) + 50)
    (found,) = execute(COPY + WAIT + READ.format(0), [source], ["%r6"], shared=512)
    # Threads from 8 on copy 0 of 16 bytes, and fill the rest with 0.
    assert np.array_equal(found, np.where(LANES < 8, 51 + 4 * LANES, 0))


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (COPY + READ.format(0), "not waited for"),
        (COPY + "cp.async.wait_group 1; " + READ.format(0), "not waited for"),
        (COPY + COPY.replace("cp.async.commit", "// ") + WAIT, "not waited for"),
        (COPY, "pending"),
    ],
)
def test_an_asynchronous_copy_needs_a_wait(code, fault):
    with pytest.raises(Fault, match=fault):
        execute(code.replace("//", "\n//") + "\n", [words(0)], [], shared=512)


@pytest.mark.parametrize("order", ORDERS)
def test_other_warps_see_a_copy_after_a_barrier(order):
    source = [torch.arange(64, dtype=torch.int32)]
    code = COPY + WAIT + "{}" + READ.format(512)
    execute(code.replace("{}", "bar.sync 0;", 1), source, ["%r6"], warps=2, shared=1024, order=order)
    with pytest.raises(Fault, match="nothing has stored|without a barrier"):
        execute(code.replace("{}", "", 1), source, ["%r6"], warps=2, shared=1024, order=order)


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("ld.global.b32 %r9, [%rd1+128];", "is in no tensor|offsets"),
        ("ld.global.b32 %r9, [%rd1+-4];", "is in no tensor|offsets"),
        ("ld.global.v2.b32 {%r9, %r10}, [%rd1];", "multiples"),
        ("mov.b32 %r1, global_smem; ld.shared.b32 %r9, [%r1+64];", "offsets"),
        ("setp.lt.u32 %p1, %r0, 5; @%p1 bra $L; $L: mov.b32 %r9, 1;".replace("$L:", "\n$L:"), "some lanes"),
    ],
)
def test_faults_name_the_instruction(code, fault):
    with pytest.raises(Fault, match=rf"kernel, block \(0, 0\), warp 0, line \d+ .*({fault})"):
        execute(code, [words(1)], [], shared=64)


def test_elements_between_those_of_a_tensor_are_not_accessed():
    rows = torch.zeros(32, 2, dtype=torch.int32)[:, 0]
    even = "ld.param.b64 %rd1, [p0]; mul.wide.u32 %rd2, %r0, 8; add.s64 %rd1, %rd1, %rd2; st.global.b32 [%rd1{}], %r0; ret;"
    run(program(even.format(""), 1), (1, 1), [rows], 0)
    assert rows.tolist() == list(range(32))
    with pytest.raises(Fault, match="between the elements"):
        run(program(even.format("+4"), 1), (1, 1), [rows], 0)


def test_a_factor_of_wgmma_must_not_change_before_the_wait():
    memory = Memory({}, 1024, Now())
    memory.shared.store(SHARED_BASE + 16 * np.arange(64), np.zeros((64, 4), np.uint32))
    memory.now.barrier()
    # The descriptor of 8 rows of 128 bytes whose chunks are exchanged.
    factor = np.full(32, SHARED_BASE // 16 | 1 << 16 | 64 << 32 | 1 << 62, np.uint64)
    sums, other = (np.zeros(32, np.float32),) * 4, (np.zeros(32, np.uint32),) * 4
    for store, pending in ((False, 0), (True, 1)):
        products = Products(memory, 0)
        products.start("f16", 8, sums, other, factor, False, (False, False))
        products.commit()
        if store:
            memory.shared.store(np.array([SHARED_BASE]), np.array([[7]], np.uint32))
        products.wait(pending)
    with pytest.raises(Fault, match="has changed before"):
        products.wait(0)


@pytest.mark.parametrize(
    "code", ["frobnicate.b32 %r1, %r2;", "bar.sync 1;", "mul.f32 %r1, %r2, banana;", "cvt.rp.f32.s32 %r1, %r2;"]
)
def test_unknown_instructions_are_refused_with_their_line(code):
    with pytest.raises(ValueError, match=r"kernel, line \d+: .*the emulator does not know"):
        program(code, 0)
