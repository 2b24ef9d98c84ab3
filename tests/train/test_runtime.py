"""The settings of a worker: what holds within the block in which they apply, and after it."""

import pytest
import torch

from cope_sweep.train import Runtime


def products():
    """1e-39 each, which is subnormal; too few for another thread, which would have what held where torch started it."""
    return torch.full((1000,), 1e-38).mul(0.1)


@pytest.mark.parametrize("threads", [1, 2])
def test_on_a_cpu_subnormal_numbers_are_zero_within_the_block_alone(threads):
    before = torch.get_num_threads()
    with Runtime(threads=threads).applied():
        assert torch.get_num_threads() == threads
        assert not products().any()
    assert torch.get_num_threads() == before
    assert products().all()


def test_a_process_that_flushes_subnormal_numbers_goes_on_to():
    torch.set_flush_denormal(True)
    try:
        for device in ("cpu", "cuda"):
            with Runtime(device=device).applied():
                assert not products().any()
            assert not products().any()
    finally:
        torch.set_flush_denormal(False)


def test_for_a_gpu_the_setting_of_the_cpu_is_left_alone():
    with Runtime(device="cuda").applied():
        assert products().all()


@pytest.mark.parametrize(("micro_batch", "workers", "at_once"), [(None, 1, 10), (None, 3, 4), (2, 3, 2), (8, 3, 4)])
def test_a_forward_pass_takes_no_more_than_the_share_of_a_worker(micro_batch, workers, at_once):
    assert Runtime(micro_batch=micro_batch, world_size=workers).at_once(10) == at_once
