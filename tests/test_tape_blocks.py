"""Models whose whole forward is not recordable, because it reads its time step back: their blocks are, one by one.

That is found out in the first call of a size; blocks are recorded in the second.
On the CPU. Fused programs are planned, and their kernels counted, but they run unfused: Triton's interpreter takes
seconds a block. One test lets it.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tools import architectures
from tools.driving import compiled, in_threads
from tools.oracles import error, fallbacks, shapes
from tools.patching import choose_attention, read_back

pytestmark = pytest.mark.usefixtures("clean_stats", "fusing")

CLOSE = 1e-5  # relative L2 in fp32
CHANGED = 1e-3  # by how much a change must show, so that a test can tell
DEEPER = {
    "ZImage": {"n_layers": 4},
    "Flux": {"depth": 3, "depth_single_blocks": 4},
    "MiniMaxH3": {"num_layers": 4},
    "LTXAV": {"num_layers": 4},
}
LISTS = {
    "ZImage": {"layers": 4}, "Flux": {"double_blocks": 3, "single_blocks": 4}, "MiniMaxH3": {"blocks": 4},
    "LTXAV": {"transformer_blocks": 4},
}  # fmt: skip


@pytest.fixture
def counted(pack, monkeypatch):
    """How many blocks were recorded, and how many ran on a program."""
    from anyshape.accel import block_tier

    counts = {"recorded": 0, "replayed": 0}

    def spy(owner, name, what):
        own = getattr(owner, name)

        def counting(*args):
            counts[what] += 1
            return own(*args)

        monkeypatch.setattr(owner, name, counting)

    spy(block_tier, "record_block", "recorded")
    spy(block_tier.BlockTier, "_replay", "replayed")
    return counts


@pytest.fixture
def make(pack, monkeypatch):
    """A model of the table with more blocks, which reads its time step back at each call."""
    from tools.architectures import patchers

    def made(name="ZImage", **config):
        entry = architectures.TABLE[name]
        entry = replace(entry, config={**entry.config, **DEEPER[name], **config})
        monkeypatch.setitem(architectures.TABLE, name, entry)
        patcher = patchers.make(name)
        if name != "MiniMaxH3":  # which does it by itself
            read_back(patcher.model.diffusion_model)
        return patcher

    return made


def forward(patcher, name="ZImage", k=0):
    from tools.architectures import patchers

    return patchers.forward(patcher, name, k)


def layers(patcher):
    return patcher.model.diffusion_model.layers


def is_as_it_was(patcher):
    return not any("forward" in part.__dict__ for part in patcher.model.diffusion_model.modules())


# What is recorded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "tries"), [("ZImage", 1), ("Flux", 5), ("LTXAV", 3)])
def test_each_kind_of_block_is_recorded_once_and_fits_all_others(make, counted, name, tries):
    """tries: Flux and LTX-2 add to their inputs in place, which is found one input at a time."""
    from anyshape.accel.tape import kernels

    patcher = make(name)
    fast, blocks, kinds = compiled(patcher), sum(LISTS[name].values()), len(LISTS[name])
    assert error(forward(fast, name), forward(patcher, name)) < CLOSE
    assert counted == {"recorded": tries, "replayed": blocks - kinds}
    assert error(forward(fast, name), forward(patcher, name)) < CLOSE
    assert counted == {"recorded": tries, "replayed": 2 * blocks - kinds}
    before = len(kernels._COMPILED)
    assert error(forward(fast, name, 1), forward(patcher, name, 1)) < CLOSE
    assert counted["recorded"] == tries + kinds and len(kernels._COMPILED) == before
    assert is_as_it_was(patcher)
    for shape in shapes():
        assert shape["state"] == "tape" and shape["reason"] == ""
        assert "blocks recorded one by one, not the whole forward: a value came back" in shape["note"]
        assert "tools/patching.py:" in shape["note"]


def test_blocks_that_write_into_their_input(make, counted, monkeypatch):
    """The caller sees what a block wrote. It takes two runs to record the first: in place, and then on a copy."""
    patcher = make()
    kind = type(layers(patcher)[0])

    def writing(self, x, *args, **kwargs):
        x[:, :4].mul_(1.5)
        x.add_(0.25)
        return kind.forward(self, x, *args, **kwargs) + x

    written, passed, model = type(kind.__name__, (kind,), {"forward": writing}), [], patcher.model.diffusion_model

    def embed(self, *args, **kwargs):
        out = super(type(model), model).patchify_and_embed(*args, **kwargs)
        torch.passed.append(out[0])  # to the first layer; where it is not taken for what a pack keeps
        return out

    monkeypatch.setattr(torch, "passed", passed, raising=False)

    model.__class__ = type(type(model).__name__, (type(model),), {"patchify_and_embed": embed})
    for layer in layers(patcher):
        layer.__class__ = written
    fast = compiled(patcher)
    for k in (0, 0, 0, 1, 1):
        wanted = forward(patcher, k=k)
        assert error(forward(fast, k=k), wanted) < CLOSE
        theirs, ours = passed[-2:]
        assert ours is not theirs and error(ours, theirs) < CLOSE
    assert counted == {"recorded": 3, "replayed": 18} and shapes()[0]["state"] == "tape"


@pytest.mark.parametrize("chosen", [False, True], ids=["as it is", "attention chosen by ComfyUI's node"])
def test_blocks_of_minimax_h3(make, counted, chosen):
    """They write into their input by slices, and ComfyUI's own operation turns queries and keys in place."""
    minimax = pytest.importorskip("comfy.ldm.minimax.model", reason="this ComfyUI has no MiniMax H3")
    patcher = make("MiniMaxH3")
    fast = compiled(patcher)
    for k in (0, 0, 0, 1, 1, 4, 4):
        for each in (patcher, fast) if chosen else ():  # another function each time, as when the node runs again
            choose_attention(each, minimax.optimized_attention)
        assert error(forward(fast, "MiniMaxH3", k), forward(patcher, "MiniMaxH3", k)) < CLOSE
    assert counted == {"recorded": 4, "replayed": 25}  # twice for the first size: in place, then on a copy
    assert all(shape["state"] == "tape" and "minimax/model.py:" in shape["note"] for shape in shapes())


def test_kernels_in_the_interpreter(make, monkeypatch, counted):
    """As it is on a GPU: fused."""
    from anyshape.accel import maker
    from anyshape.accel.tape.program import Program

    monkeypatch.setattr(maker.Maker, "made", lambda self, tape, fuse, call: Program(tape, fuse))
    patcher = make("Flux", depth=0, depth_single_blocks=3)
    assert error(forward(compiled(patcher), "Flux"), forward(patcher, "Flux")) < CLOSE
    assert counted == {"recorded": 2, "replayed": 2} and shapes()[0]["state"] == "tape"


# What is not ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["layers.1", "layers.1.adaLN_modulation.0"])
def test_a_hook_on_one_block_makes_that_block_eager(make, counted, part):
    patcher = make()
    fast, plain = compiled(patcher), forward(patcher)
    assert error(forward(fast), plain) < CLOSE
    hooked = patcher.model.diffusion_model.get_submodule(part)
    handle = hooked.register_forward_hook(lambda module, args, out: out * 1.5)
    wanted = forward(patcher)
    counted.update(recorded=0, replayed=0)
    assert error(wanted, plain) > CHANGED and error(forward(fast), wanted) < CLOSE
    assert counted == {"recorded": 1, "replayed": 2}
    assert "hooked" in shapes()[-1]["reason"] and shapes()[-1]["state"] == "tape"
    handle.remove()
    assert error(forward(fast), plain) < CLOSE


def test_a_plain_attribute_that_differs(make, counted):
    """Blocks are alike only if their code cannot tell them apart."""
    from anyshape.accel.tape.blocks import likeness

    patcher = make()
    for layer in layers(patcher):  # an attention that its file names, say
        layer.function = partial(torch.mul, other=2.0)
    assert len({likeness(layer) for layer in layers(patcher)}) == 1  # though each has a number of its own
    layers(patcher)[2].function = partial(torch.mul, other=3.0)
    assert len({likeness(layer) for layer in layers(patcher)}) == 2
    for layer in layers(patcher):
        del layer.function
    norm = next(part for part in layers(patcher)[2].modules() if hasattr(part, "eps"))
    norm.eps = 0.5
    assert len({likeness(layer) for layer in layers(patcher)}) == 2
    assert error(forward(compiled(patcher)), forward(patcher)) < CLOSE
    assert counted["recorded"] == 2


def test_a_lora_on_one_block(make, counted):
    patcher = make()
    fast, plain = compiled(patcher), forward(patcher)
    with torch.inference_mode():
        fast.patch_model()  # loads it
    forward(fast)
    name = next(name for name, weight in layers(patcher)[1].named_parameters() if weight.ndim == 2)
    key = f"diffusion_model.layers.1.{name}"
    change = torch.randn(patcher.model.state_dict()[key].shape, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        fast.unpatch_model()
        assert fast.add_patches({key: ("diff", (0.2 * change,))}) == [key]
        fast.patch_model()
    wanted = forward(patcher)  # the same model: its weights are patched
    counted.update(recorded=0, replayed=0)
    assert error(wanted, plain) > CHANGED and error(forward(fast), wanted) < CLOSE
    assert counted == {"recorded": 0, "replayed": 4}
    with torch.inference_mode():
        fast.unpatch_model()
    assert error(forward(fast), plain) < CLOSE


def test_a_wrong_program_costs_nothing(make, monkeypatch):
    from anyshape.accel import block_tier, maker
    from anyshape.accel.tape.program import Program

    class Wrong(Program):
        def __init__(self, tape, fuse, wrong=frozenset()):
            super().__init__(tape, fuse=False)
            self.report.kernels = 1

        def run(self, inputs, bound=None):
            out, written = super().run(inputs, bound)
            return out * 1.5, written

    monkeypatch.setattr(maker.Maker, "made", lambda self, tape, fuse, call: Wrong(tape, fuse))
    monkeypatch.setattr(block_tier, "Program", Wrong)
    patcher = make()
    fast = compiled(patcher)
    for _ in range(3):
        assert error(forward(fast), forward(patcher)) < CLOSE
        assert shapes()[-1]["state"] == "eager"
    assert any("wrong result" in entry["reason"] for entry in fallbacks())


def test_blocks_that_gain_nothing_are_left_alone(make, counted, monkeypatch):
    from anyshape.accel import block_tier, maker
    from anyshape.accel.tape.program import Program

    monkeypatch.setattr(maker.Maker, "made", lambda self, tape, fuse, call: Program(tape, fuse=False))
    patcher = make()
    fast = compiled(patcher)
    for _ in range(3):
        assert torch.equal(forward(fast), forward(patcher))
    assert counted == {"recorded": 1, "replayed": 0} and shapes()[-1]["state"] == "eager"
    assert shapes()[-1]["note"] == block_tier.NO_GAIN


@pytest.mark.parametrize("name", ["ZImage", "Flux"])
def test_a_clock_decides_nothing(make, counted, monkeypatch, name):
    """What runs is the same whichever way was faster; the stats say so. Timing runs the block again, on copies."""
    from anyshape.accel import block_tier

    out, notes, ks = {}, {}, (0, 0, 0, 1, 1)
    plain = make(name)
    wanted = {k: forward(plain, name, k) for k in ks}
    for faster in ("eager", "program"):

        def timed(way, device, faster=faster):
            return way(), 0.0, 1.0 if way.__name__ == faster else 2.0

        monkeypatch.setattr(block_tier, "_is_timed", lambda device: True)
        monkeypatch.setattr(block_tier, "timed", timed)
        fast = compiled(make(name))
        out[faster] = [forward(fast, name, k) for k in ks]
        assert all(error(each, wanted[k]) < CLOSE for k, each in zip(ks, out[faster], strict=True))
        assert {shape["state"] for shape in shapes()} == {"tape"} and counted["replayed"]
        notes[faster] = [shape["note"] for shape in shapes()][-2:]
        counted["replayed"] = 0
    assert all(torch.equal(a, b) for a, b in zip(*out.values(), strict=True))
    assert all("are no faster at this size" in note for note in notes["eager"])
    assert not any("no faster" in note for note in notes["program"])


def test_exact_mode_records_no_blocks(make, counted):
    patcher = make()
    assert torch.equal(forward(compiled(patcher, mode="exact")), forward(patcher))
    assert counted == {"recorded": 0, "replayed": 0} and shapes()[-1]["state"] == "eager"


def test_an_error_of_a_block_is_the_users_to_see(make, monkeypatch):
    patcher = make()
    fast, plain = compiled(patcher), forward(patcher)
    kind = type(layers(patcher)[0])
    own, broken = kind.forward, []

    def forward_(self, *args, **kwargs):
        if broken and self is layers(patcher)[2]:
            raise ValueError("theirs")
        return own(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward_)
    forward(fast)
    broken.append(1)
    layers(patcher)[2].register_forward_hook(lambda module, args, out: out)  # so that it runs in eager
    with pytest.raises(ValueError, match="theirs"):
        forward(fast)
    assert is_as_it_was(patcher)
    broken.clear()
    assert error(forward(fast), plain) < CLOSE


def test_two_threads_on_one_model(make):
    patcher = make()
    fast, wanted = compiled(patcher), [forward(patcher, k=k) for k in range(3)]

    def run(times):
        for k, want in list(enumerate(wanted)) * times:
            assert error(forward(fast, k=k), want) < CLOSE

    in_threads(run, (3, 3))
    assert is_as_it_was(patcher)


def test_the_programs_let_go_of_a_model(make):
    import gc
    import weakref

    from anyshape.accel.comfy import known_code
    from anyshape.accel.comfy.attach import engine_of

    patcher = make()
    fast = compiled(patcher)
    forward(fast)
    tier = engine_of(fast)(patcher.model.diffusion_model)._tape._blocks
    assert any(take.bound for takes in tier._takes.values() for take in takes)
    tier.release()
    assert not any(take.bound for takes in tier._takes.values() for take in takes)
    weight = weakref.ref(patcher.model.diffusion_model.layers[0])
    known_code.fingerprints(patcher.model.diffusion_model).release()  # as at the end of a sampling run
    del patcher, fast
    gc.collect()
    assert weight() is None
