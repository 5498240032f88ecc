"""Graphs on a real GPU, of small forwards in plain torch: what the driver says of their memory, streams, devices."""

import contextlib
import gc
import threading

import pytest
import torch

from tools import embed

embed.bare_pack()

from anyshape.accel import graphs, stats  # noqa: E402 - the package exists from the line above on
from anyshape.accel.allocator import addresses_are_promised  # noqa: E402
from anyshape.accel.call import Call, Settings  # noqa: E402
from anyshape.accel.engine import Engine  # noqa: E402
from anyshape.accel.errors import CaptureFailed  # noqa: E402
from anyshape.accel.key import shape_key  # noqa: E402
from anyshape.accel.pools import segments_of  # noqa: E402
from anyshape.accel.take import Taped  # noqa: E402

from tools.gpu_captures import FLOATS, MIB, capture, comfy_free, fits, forward, in_use  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def cache(monkeypatch):
    """The only one, and a first capture behind it: the driver loads code at the first ones."""
    monkeypatch.setattr(graphs, "_CACHES", {})
    monkeypatch.setattr(graphs, "STATS", stats.Stats())
    gc.collect()
    found = graphs.cache(torch.device("cuda", torch.cuda.current_device()))
    capture(found, torch.ones(FLOATS, device="cuda"), blow_up=4)
    found.clear()
    yield found
    found.clear()


native = pytest.mark.skipif("addresses_are_promised()", reason="with cudaMallocAsync the driver holds the pool")


# Memory -----------------------------------------------------------------------------------------------------------


def test_the_driver_gives_out_no_more_than_the_budget(cache):
    """12 shapes, each with 54 MB in and out and 200 to 800 MB in between: the last ones do not fit alone."""
    forward({"x": torch.ones(27 * FLOATS, device="cuda")}, 4)  # the driver loads code for sizes like these
    budget, before, most = 700 * MIB, in_use(), 0
    for index in range(12):
        x = torch.ones((27 * FLOATS) + 1024 * index, device="cuda")
        with contextlib.suppress(CaptureFailed):
            capture(cache, x, budget, blow_up=4 + index)
        del x
        given = in_use() - before
        most = max(most, given)
        print(index, len(cache), given // MIB, cache.used_bytes // MIB)
        assert given <= budget + 8 * MIB
        assert abs(given - cache.used_bytes) <= 24 * MIB * max(1, len(cache))
    assert most > 300 * MIB
    cache.clear()
    assert cache.used_bytes == 0 and in_use() - before <= 8 * MIB


def test_static_inputs_and_outputs_are_in_the_budget(cache):
    """12 shapes with 54 MB in and out, hardly anything in between, and 200 MB for them."""
    budget, before = 200 * MIB, in_use()
    for index in range(12):
        x = torch.ones((27 * FLOATS) + 1024 * index, device="cuda")
        capture(cache, x, budget, run=lambda inputs, _: inputs["x"] * 2.0)
        del x
        given = in_use() - before
        print(index, len(cache), given // MIB, cache.used_bytes // MIB)
        assert given <= budget + 8 * MIB
    assert 1 <= len(cache) <= 3
    cache.clear()
    assert in_use() - before <= 8 * MIB


@native
def test_what_comfyui_takes_for_free_is(cache, comfy):
    """A card with 12 GB left, graphs with a pool of 2 GB: the next model gets what ComfyUI believes in."""
    import comfy.model_management as mm

    torch.cuda.empty_cache()
    left = 12 << 30
    card = torch.empty(max(0, torch.cuda.mem_get_info()[0] - left), dtype=torch.uint8, device="cuda")
    names = [capture(cache, torch.ones(64 * FLOATS + n, device="cuda"), blow_up=16) for n in (0, 1024, 2048)]
    torch.cuda.empty_cache()
    pool = cache._capturer.pool_bytes
    slack = 256 * MIB
    believed = mm.get_free_memory(card.device)
    print(pool // MIB, believed // MIB, comfy_free() // MIB, torch.cuda.mem_get_info()[0] // MIB)
    assert pool > 900 * MIB
    assert abs(believed - torch.cuda.mem_get_info()[0]) < slack  # without a ballast: the pool more
    assert fits(int(believed) - slack)
    for name in names:  # and the graphs are what they were
        x = torch.rand(name.key.inputs[0].shape, device="cuda")
        assert torch.allclose(cache.replay(name, 0, {"x": x}), forward({"x": x}, 16))
    cache.clear()
    torch.cuda.empty_cache()
    assert mm.get_free_memory(card.device) > believed + 900 * MIB


@native
def test_pools_of_a_long_session(cache):
    """torch numbers pools on and on. Looks at those beyond the 256th could end the process (see ``pools``)."""
    while max(torch.cuda.graph_pool_handle()) <= 256:
        pass
    for index in range(20):  # without graphs a pool is gone, so each has another
        name = capture(cache, torch.ones(16 * FLOATS + index, device="cuda"), blow_up=8)
        assert cache._capturer.pool_bytes >= 8 * 16 * MIB
        x = torch.rand(name.key.inputs[0].shape, device="cuda")
        assert torch.allclose(cache.replay(name, 0, {"x": x}), forward({"x": x}, 8))
        cache.clear()


@native
def test_the_ballast_takes_nothing_and_is_out_of_the_way_of_captures(cache):
    """Later graphs use the pool's memory again, whatever lay in it; the largest first, so that it never grows."""
    names, reserved = [], []
    for index, blow_up in enumerate((16, 12, 9, 5, 3)):
        names.append(capture(cache, torch.ones(16 * FLOATS - 1024 * index, device="cuda"), blow_up=blow_up))
        assert sum(t.numel() for t in cache._capturer._ballast) > 0.9 * cache._capturer.pool_bytes
        reserved.append(cache._capturer.pool_bytes)
    assert len(set(reserved)) == 1
    for name in reversed(names):
        x = torch.rand(name.key.inputs[0].shape, device="cuda")
        assert torch.equal(cache.replay(name, 0, {"x": x}), forward({"x": x}, name.program[1]))
    cache.drop_owner(0)
    assert not cache._capturer._ballast and cache._capturer.pool_bytes == 0


@native
def test_no_workspace_of_a_library_lies_in_the_pool(cache):
    """It would stay there for ever: the program has run on the captures' stream before."""

    def products(inputs, _):
        x = inputs["x"].view(512, 512)
        y = torch._int_mm((x * 8).to(torch.int8), (x * 8).to(torch.int8))  # its library refuses a capture otherwise
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            z = x.to(dtype)
            y = y + z @ z + torch.nn.functional.linear(z, z, z[0])
        return y.flatten().float()

    name = capture(cache, torch.rand(512 * 512, device="cuda"), run=products, program="products")
    cache._capturer._ballast.clear()
    torch.cuda.synchronize()
    segments = segments_of(cache._capturer._pool, torch.cuda.current_device())
    live = [block for s in segments for block in s["blocks"] if block["state"] != "inactive"]
    assert live == []
    x = torch.rand(512 * 512, device="cuda")
    assert torch.allclose(cache.replay(name, 0, {"x": x}), products({"x": x}, 1), rtol=1e-3, atol=1e-2)


@native
def test_workspaces_that_someone_clears_are_nobody_elses(cache):
    """As torch's own graphs do. Ours go on using them."""

    def products(inputs, _):
        x = inputs["x"].view(64, -1).half()  # so deep that the product is split, and summed in a workspace
        return torch.addmm(x[0, :64], x, x.T).float() + (x @ x.T).float()

    x = torch.rand(64 << 14, device="cuda")
    name = capture(cache, x, run=products, program="products")
    wanted = cache.replay(name, 0, {"x": x})
    for again in range(2):
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        taken = [torch.full((size * MIB,), 7, dtype=torch.uint8, device="cuda") for size in (1, 4, 8, 16, 32, 32, 64)]
        for _ in range(3):
            assert torch.equal(cache.replay(name, 0, {"x": x}), wanted)
        assert all(bool((block == 7).all()) for block in taken)
        del taken
        capture(cache, x * 2, run=products, program=f"products {again}")  # which makes them again


def test_memory_that_is_short_in_a_capture_makes_room(cache):
    """What torch has cached may go; what a graph holds as well; the account stays right."""
    total = torch.cuda.get_device_properties(0).total_memory
    capture(cache, torch.ones(64 * FLOATS, device="cuda"), owner=1, blow_up=8)
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 700 * MIB) / total)
        x = torch.ones(32 * FLOATS, device="cuda")
        with contextlib.suppress(CaptureFailed, torch.OutOfMemoryError):
            capture(cache, x, owner=2, blow_up=24)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    cache.clear()
    assert cache.used_bytes == 0


# What happens at the same time ------------------------------------------------------------------------------------


def test_replays_on_two_streams_do_not_overlap(cache):
    """Two threads, two graphs of one pool, a stream each."""
    names = [capture(cache, torch.ones(4 * FLOATS + n, device="cuda"), blow_up=8) for n in (0, 1024)]
    wrong = []

    def work(name, factor):
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.full(name.key.inputs[0].shape, float(factor), device="cuda")
            for _ in range(1000):
                out = cache.replay(name, 0, {"x": x})
                wrong.append((out != 8 * (2 * factor + 1)).sum())
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(name, index + 3)) for index, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(int(count) for count in wrong) == 0


def test_the_collector_ends_no_capture(cache):
    """An engine with a graph becomes garbage within another capture, and is collected there."""
    engine = Engine(stats.Stats().model("Gone", "model"))
    capture(cache, torch.ones(FLOATS, device="cuda"), owner=id(engine))
    engine.cycle = engine
    owners = [engine]
    del engine

    def collects(inputs, _):
        if torch.cuda.is_current_stream_capturing():
            assert not gc.isenabled()
            owners.clear()
            gc.collect()
        return inputs["x"] * 2.0

    name = capture(cache, torch.ones(2 * FLOATS, device="cuda"), owner=-1, run=collects)
    assert not owners and gc.isenabled() and not cache._capturer.broken
    x = torch.rand(2 * FLOATS, device="cuda")
    assert torch.equal(cache.replay(name, 0, {"x": x}), x * 2.0)
    assert len(cache) == 1


def test_a_capture_that_fails_for_good_costs_no_other_graph(cache):
    """``item`` waits for the GPU, which no capture can."""
    if addresses_are_promised():
        pytest.skip("no capture can begin after one that broke off")
    first = capture(cache, torch.ones(FLOATS, device="cuda"))
    x = torch.ones(2 * FLOATS, device="cuda")
    tried = []

    def reads_back(inputs, _):
        tried.append(torch.cuda.is_current_stream_capturing())
        return inputs["x"] * inputs["x"].sum().item()

    def runs_short(inputs, _):
        if torch.cuda.current_stream() != torch.cuda.default_stream():
            raise torch.OutOfMemoryError
        return inputs["x"]

    for program, run in (("reads back", reads_back), ("runs short", runs_short), ("reads back too", reads_back)):
        for _ in range(3):
            with pytest.raises(CaptureFailed):
                capture(cache, x, run=run, program=program)
            first = first if len(cache) else capture(cache, x[:FLOATS])  # where memory is short the others give way
    assert tried.count(True) == 3  # once more at most
    later = capture(cache, x)
    torch.cuda.empty_cache()
    for name, y in ((first, x[:FLOATS]), (later, x)):
        assert torch.equal(cache.replay(name, 0, {"x": y}), forward({"x": y}))
    cache.drop_owner(0)
    assert cache._capturer.pool_bytes == 0 and not cache._capturer._ballast


def test_a_capture_whose_end_says_that_it_failed(cache):
    """Something within it did not raise. torch must not go on to take a capture for under way."""
    if addresses_are_promised():
        pytest.skip("no capture can begin after one that broke off")
    x, tried = torch.ones(FLOATS, device="cuda"), []
    first = capture(cache, x)

    def run():
        with contextlib.suppress(RuntimeError):
            tried.append(x[0].item())

    with pytest.raises(RuntimeError):
        cache._capturer.capture(run, torch.float32)
    assert not tried
    total = torch.cuda.get_device_properties(0).total_memory
    del [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)][:]
    try:  # torch gives its cache back where memory is short, which it does not while a capture is under way
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * MIB) / total)
        assert torch.empty(512 * MIB, dtype=torch.uint8, device="cuda").is_cuda
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    later = capture(cache, x * 2, program=1)
    for name in (first, later):
        assert torch.equal(cache.replay(name, 0, {"x": x}), forward({"x": x}))


# Devices ----------------------------------------------------------------------------------------------------------


def test_a_model_on_the_second_gpu(cache):
    """While the first one is current, as packs for several GPUs leave it: Triton starts on the current device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    device = torch.device("cuda", 1)
    x = torch.randn(2, 64, 32, 32, device=device, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(2, 64, device=device, dtype=torch.float16)
    norm, seen = torch.nn.GroupNorm(32, 64, 1e-5, device=device, dtype=torch.float16), []
    norm.weight.data, norm.bias.data = weight, bias

    def run(options):
        seen.append(torch.cuda.current_device())
        return torch.nn.functional.silu(norm(x))

    engine = Engine(stats.Stats().model("Second", "model"))
    inputs = {"x": x}
    for _ in range(3):
        with torch.inference_mode():
            wanted = torch.nn.functional.silu(norm(x))
            taped = Taped(norm, run, {}, 0, lambda options, recorder: None)
            call = Call(shape_key(inputs), inputs, lambda: run({}), 0, width=32, height=32, batch=2, taped=taped)
            out = engine(call, Settings())
        assert out.device == device
        assert ((out - wanted).norm() / wanted.norm()).item() < 5e-3
    assert set(seen) == {1} and torch.cuda.current_device() == 0
    assert [shape.state for shape in engine.stats.shapes.values()] == ["graph"]
    engine.drop_graphs()
