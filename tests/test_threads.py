"""Several models from several threads at once, as ComfyUI's multi-GPU path calls the wrappers.

On the CPU; ``test_gpu_faults.py`` has the same with graphs.
"""

import threading

import pytest
import torch

from tools.driving import compiled, unet_forward
from tools.oracles import FUSED, error, expect, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

SIZES = [(128, 128), (136, 120), (64, 72), (200, 64)]
CLOSE = 1e-4  # relative L2 in fp32


def run_together(*bodies):
    """Runs each body in a thread of its own until all but the last are done; gives what went wrong."""
    problems, done = [], threading.Event()

    def guarded(body):
        try:
            body(done)
        except BaseException as fault:  # noqa: BLE001  told to the test
            problems.append(repr(fault))

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads[:-1]:
        thread.join(300)
    done.set()
    threads[-1].join(60)
    assert not any(thread.is_alive() for thread in threads)
    return problems


def reader(done):
    from anyshape.accel import stats

    while not done.wait(0.01):
        stats.snapshot()


def sampler(patcher, wanted):
    def sample(_):
        fast = compiled(patcher)
        for _ in range(3):
            for seed, size in enumerate(SIZES):
                assert error(unet_forward(fast, *size, seed=seed), wanted[seed]) < CLOSE

    return sample


def test_two_models_and_a_reader(models, small_unets, fusing):
    """Their first calls too, which are recorded and need new kernels, at the same time."""

    patchers = [small_unets["sd15"], small_unets["sdxl"]]
    wanted = [[unet_forward(p, *size, seed=seed) for seed, size in enumerate(SIZES)] for p in patchers]
    with expect(recompiles=0, fallbacks=0):
        assert not run_together(*(sampler(p, w) for p, w in zip(patchers, wanted, strict=True)), reader)
    assert {s["state"] for s in shapes()} == {FUSED}
    assert sum(s["calls"] for s in shapes()) == 2 * 3 * len(SIZES)


def test_one_thread_fails_and_the_other_does_not_notice(models, small_unets, fresh):
    wanted = [unet_forward(small_unets["sd15"], *size, seed=seed) for seed, size in enumerate(SIZES)]

    def fail(_):
        broken = compiled(fresh).clone()
        broken.set_model_input_block_patch(lambda h, options: 1 / 0)
        for _ in range(6):
            with pytest.raises(ZeroDivisionError):
                unet_forward(broken, *SIZES[0])

    assert not run_together(fail, sampler(small_unets["sd15"], wanted), reader)
    assert torch.equal(unet_forward(fresh, *SIZES[1]), unet_forward(fresh.clone(), *SIZES[1]))
