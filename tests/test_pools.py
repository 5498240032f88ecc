"""A look at torch's account of a pool costs nothing that others hold. What lies in pools: test_gpu_graphs."""

import sys

import pytest
import torch

from tools import embed

embed.bare_pack()

from anyshape.accel import pools  # noqa: E402 - the package exists from the line above on

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, "_cuda_memorySnapshot"), reason="this torch has no account of pools: it is built for a CPU"
)
NUMBER = 1_000_000_009  # beyond those that Python keeps for good, as of a process's 257th pool


def large() -> int:
    """A new object, whatever other code has the same number."""
    return int(str(NUMBER))


def test_a_handles_number_outlives_looks_at_its_pool():
    """torch 2.11 gives back a reference of it at each look: a long session of ComfyUI would end there."""
    number = large()
    held = [number] * 100  # so that a fault fails this test alone
    before = sys.getrefcount(number)
    for _ in range(10):
        assert pools.segments_of((0, number), 0) == []
    assert sys.getrefcount(number) >= before  # more where torch is right
    assert held[0] == NUMBER


def test_a_torch_that_takes_no_pool(monkeypatch):
    """Then its account of everything is looked through."""
    mine, other = (0, large()), (0, 7)
    listed = [{"segment_pool_id": pool, "device": index} for pool in (mine, other) for index in (0, 1)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: listed)
    assert pools.segments_of(mine, 1) == [{"segment_pool_id": mine, "device": 1}]
