"""Blocks that are alike are written down as copies of the first one: the tape is as if each had been recorded.

Small blocks of plain torch for what keeps a block from being copied; ComfyUI's models for the tapes themselves.
"""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn

from tools import architectures, embed

embed.bare_pack()

from anyshape.accel import block_copies  # noqa: E402 - the package exists from the line above on
from anyshape.accel.key import shape_key  # noqa: E402
from anyshape.accel.take import Taped  # noqa: E402
from anyshape.accel.tape.program import Program  # noqa: E402
from anyshape.accel.tape.values import Constant, Value  # noqa: E402
from anyshape.accel.tapes import Tapes  # noqa: E402

COUNT = 5


class Block(nn.Module):
    """A block whose forward is a function of the test's."""

    def __init__(self, body) -> None:
        super().__init__()
        self.lin, self.norm, self.body = nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4)), body

    def forward(self, x, *args, transformer_options={}):  # noqa: B006  as ComfyUI's do
        return self.body(self, x, *args, transformer_options)


def plain(self, x, options):
    return x + self.lin(self.norm(x))


class Model(nn.Module):
    """COUNT blocks, one behind the other; ``call`` is how a block is called."""

    def __init__(self, body, call) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(body) for _ in range(COUNT)).requires_grad_(False)
        self.call = call

    def forward(self, x, transformer_options):
        for number, block in enumerate(self.layers):
            x = self.call(block, x, number, transformer_options)
        return x * 2


def usual(block, x, number, options):
    return block(x, transformer_options=options)


def x_of(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def recorded(model, tapes=None):
    """(the take, its tape)."""
    x = x_of()
    taped = Taped(model, lambda noted: model(x, noted), {}, 0, lambda options, recorder: None)
    _, take, tape = (tapes or Tapes()).record(shape_key({"x": x}, {}), True, taped, {"x": x})
    return take, tape


def assert_replays(model, tape, *seeds) -> None:
    """The tape's program gives what eager gives for other inputs, bit by bit."""
    program = Program(tape, fuse=False)
    program.bind(model)
    with torch.inference_mode():
        for seed in seeds:
            assert torch.equal(program.run([x_of(seed)]), model(x_of(seed), {}))


def copied_right(body=plain, call=usual, copies=COUNT - 1) -> None:
    """As many blocks are copies, and the program is right."""
    model = Model(body, call)
    take, tape = recorded(model)
    assert tape is not None, take.reason
    assert take.copies == copies
    assert_replays(model, tape, 1, 2)


def test_blocks_are_copies_of_the_first() -> None:
    copied_right()


def in_place(self, x, options):
    x.mul_(1.5).add_(self.lin(x))
    return x


def test_a_block_that_writes_into_its_argument() -> None:
    copied_right(in_place, lambda block, x, number, options: block(x * 1, transformer_options=options))
    copied_right(in_place, lambda block, x, number, options: block(x * 1 if number == 0 else x))


def several(self, x, options):
    y = self.lin(x)
    return y, {"sum": x + y, "number": 3}


def test_results_in_containers() -> None:
    copied_right(several, lambda block, x, number, options: block(x)[0] + block(x)[1]["sum"], COUNT * 2 - 1)


def test_arguments_that_all_blocks_share() -> None:
    shared: dict = {}

    def call(block, x, number, options):
        if number == 0:
            shared["now"] = x * 3, torch.arange(4.0).cos()
        return block(x, *shared["now"])

    copied_right(lambda self, x, gate, table, options: x + self.lin(x) * gate * table.view(1, 4), call)


def test_a_constant_of_its_own_for_each_block() -> None:
    """What is computed from it alone is a constant, too, so another one is no copy."""
    copied_right(
        lambda self, x, table, options: x + self.lin(x) * table.sin(),
        lambda block, x, number, options: block(x, torch.full((4,), float(number)).cumsum(0)),
        0,
    )


def test_a_block_that_reads_its_number() -> None:
    def call(block, x, number, options):
        options["number"] = number
        return block(x, transformer_options=options)

    copied_right(lambda self, x, options: x * (options["number"] + 2) + self.lin(x), call, 0)
    copied_right(lambda self, x, options: x * 2 + self.lin(x), call)  # nobody reads it


def test_a_plain_copy_of_the_options() -> None:
    """Nobody knows what is read of it, so all of it must be the same."""
    body = lambda self, x, options: x * (options.get("number", 0) + 2) + self.lin(x)  # noqa: E731
    copied_right(body, lambda block, x, number, options: block(x, transformer_options={"number": number // 4}), 3)


def test_a_block_that_changes_its_options_or_a_list() -> None:
    def noting(self, x, options):
        options["seen"] = options.get("seen", 0) + 1
        return x * options["seen"] + self.lin(x)

    copied_right(noting, usual, 0)

    def listing(self, x, found, options):
        found.append(x)
        return x * len(found) + self.lin(x)

    found: list = []

    def call(block, x, number, options):
        if number == 0:
            found.clear()
        return block(x, found)

    copied_right(listing, call, 0)


def test_a_block_that_writes_into_a_constant() -> None:
    def body(self, x, options):
        room = torch.zeros(3, 4)
        room[:2] = x[:2]
        return room + self.lin(x)

    copied_right(body, usual, 0)


def test_a_tensor_that_the_model_hangs_on_its_blocks() -> None:
    def call(block, x, number, options):
        block.hint = x * (number + 1)
        out = block(x)
        del block.hint
        return out

    copied_right(lambda self, x, options: x + self.lin(x) + self.hint, call, 0)


def test_weights_of_another_form_or_class() -> None:
    model = Model(plain, usual)
    model.layers[2].lin = nn.Linear(4, 4, bias=False).requires_grad_(False)
    model.layers[3].lin.forward = lambda x: x * 2
    take, tape = recorded(model)
    assert take.copies == 2
    assert_replays(model, tape, 1)


def test_blocks_that_differ_after_all_are_recorded_one_by_one() -> None:
    """What a copy leaves elsewhere is a tensor from nowhere; the next recording is of the whole."""
    kept: dict = {}

    def body(self, x, options):
        kept["last"] = self.lin(x)
        return x + kept["last"]

    model = Model(body, usual)
    own = model.forward
    model.forward = lambda x, transformer_options: own(x, transformer_options) + kept["last"]
    tapes = Tapes()
    take, tape = recorded(model, tapes)
    assert tape is None and take.copies == COUNT - 1 and "not an input, not a weight" in take.reason
    take, tape = recorded(model, tapes)
    assert tape is not None and take.copies == 0
    assert_replays(model, tape, 1)


def test_a_program_that_is_wrong_puts_an_end_to_copies() -> None:
    """A count that Python keeps: blocks look alike, and are not."""
    count = itertools.count()
    model = Model(lambda self, x, options: x * (next(count) % COUNT + 1) + self.lin(x), usual)
    tapes = Tapes()
    take, _ = recorded(model, tapes)
    assert take.copies == COUNT - 1
    assert tapes.doubt(take)
    take, tape = recorded(model, tapes)
    assert take.copies == 0 and not tapes.doubt(take)
    assert_replays(model, tape, 1)


def test_a_block_within_a_block() -> None:
    def body(self, x, options):
        return self.inner[3](self.inner[1](x)) + self.lin(x)

    outer = Model(body, usual)
    for block in outer.layers:
        block.inner = nn.ModuleList(Block(plain) for _ in range(4)).requires_grad_(False)
    take, tape = recorded(outer)
    assert take.copies == COUNT - 1
    assert_replays(outer, tape, 1)


# ComfyUI's models -----------------------------------------------------------------------------------------------------

DEEP = {  # with how many blocks, and how many of them are copies
    "ZImage": ({"n_layers": 4}, 3), "Flux": ({"depth": 3, "depth_single_blocks": 4}, 5),
    "QwenImage": ({"num_layers": 4}, 3), "AuraFlow": ({"n_layers": 4}, 2),
    "WAN21_T2V": ({"num_layers": 4}, 2),  # the first is given a tensor that lies in another order
    # Modulations and time steps come as objects.
    "Chroma": ({"depth": 3, "depth_single_blocks": 4}, 5), "LTXAV": ({"num_layers": 4}, 3),
    "SeedVR2": ({"num_layers": 8}, 3),  # how it cuts windows comes as functions, which the first two blocks make
    "SDXL": ({}, 7),  # two at each of four places: short lists, within lists of stages that are not alike
}  # fmt: skip


def written(tape) -> list:
    """The tape with values by their place, and constants by what is in them."""
    places: dict[Value, int] = {}

    def form(item):
        if isinstance(item, Value):
            if isinstance(item.leaf, Constant):  # each block may make the same one for itself
                return item.shape, item.stride, item.leaf.tensor.double().sum().item()
            base, leaf = None if item.base is None else places.get(item.base), item.leaf
            place = places.setdefault(item, len(places))
            return place, item.shape, item.stride, item.dtype, base, leaf
        if isinstance(item, (list, tuple)):
            return [form(each) for each in item]
        if isinstance(item, dict):
            return [(name, form(each)) for name, each in item.items()]
        return item

    return [
        (str(getattr(op.func, "__name__", op.func)), form(op.args), form(op.kwargs), form(op.outputs), form(op.writes))
        for op in tape.operations
    ]


@pytest.mark.parametrize("name", DEEP)
def test_the_tape_is_as_if_each_block_had_been_recorded(pack, monkeypatch, name) -> None:
    from dataclasses import replace

    from tools.architectures.taped import Studied

    entry = architectures.TABLE[name]
    config, copies = DEEP[name]
    entry = replace(entry, config={**entry.config, **config})
    monkeypatch.setitem(architectures.TABLE, name, entry)
    studied, counts = Studied(entry), Counter()
    kind, own = block_copies.BlockCopies, block_copies.BlockCopies._copied
    monkeypatch.setattr(kind, "_copied", lambda *args: (counts.update(["copies"]), own(*args)) and None)
    for k in (0, 1):
        copied = studied.record(k).tape
        with monkeypatch.context() as without:
            without.setattr(kind, "forward", lambda self, path, block, own, args, kwargs: own(*args, **kwargs))
            assert written(copied) == written(studied.record(k).tape)
    assert counts["copies"] == 2 * copies


# Faults ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["_found", "_values", "_keep", "_is_closed", "_copied"])
def test_a_fault_of_ours_costs_the_tape_and_not_the_forward(monkeypatch, target) -> None:
    def fail(*args):
        raise RuntimeError("injected")

    monkeypatch.setattr(block_copies.BlockCopies, target, fail)
    model, x = Model(plain, usual), x_of()
    taped = Taped(model, lambda noted: model(x, noted), {}, 0, lambda options, recorder: None)
    out, take, tape = Tapes().record(shape_key({"x": x}, {}), True, taped, {"x": x})
    assert tape is None and "injected" in take.reason
    with torch.inference_mode():
        assert torch.equal(out, model(x, {}))


def test_a_model_whose_blocks_only_look_alike_is_recorded_again_as_a_whole(pack, monkeypatch) -> None:
    """Through Compile Model: the picture is eager's, the reason is told, and the next call has a program."""
    from dataclasses import replace

    from tools.architectures import patchers
    from tools.driving import compiled
    from tools.oracles import error, fallbacks, shapes

    entry = architectures.TABLE["ZImage"]
    monkeypatch.setitem(architectures.TABLE, "ZImage", replace(entry, config={**entry.config, "n_layers": 4}))
    patcher = patchers.make("ZImage")
    layers = patcher.model.diffusion_model.layers
    kind = type(layers[0])
    monkeypatch.setattr(
        torch, "layers_called", itertools.count(), raising=False
    )  # where nobody looks for a pack's state

    def forward(self, x, *args, **kwargs):
        return kind.forward(self, x, *args, **kwargs) * (1 + next(torch.layers_called) % len(layers))

    for layer in layers:
        layer.__class__ = type(kind.__name__, (kind,), {"forward": forward}) if layer is layers[0] else type(layers[0])

    def run(model):
        arguments, named = entry.inputs(0)
        options = model.model_options["transformer_options"] | named["transformer_options"]
        named["transformer_options"] = options | {"wrappers": model.wrappers}
        with torch.inference_mode():
            return architectures.parts_of(model.model.diffusion_model(*arguments, **named))[0]

    fast, wanted = compiled(patcher), run(patcher)
    for state in ("eager", "tape", "tape"):
        assert error(run(fast), wanted) < 1e-5
        assert shapes()[-1]["state"] == state
    assert any("taken for alike" in fallback["reason"] for fallback in fallbacks())
