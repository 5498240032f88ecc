"""comfy-kitchen's functions that compute past torch's dispatcher, on tapes. On a CPU its CUDA backend is played."""

from functools import wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from tools import embed

embed.bare_pack()

from anyshape.accel.tape.program import Program  # noqa: E402 - the package exists from the line above on
from anyshape.accel.tape.record import Recorder, record  # noqa: E402
from anyshape.accel.tape.values import Tape  # noqa: E402

kitchen = pytest.importorskip("comfy_kitchen")


class Past:
    """Of the library's functions those of int8, which fill memory that torch has made, and say nothing of it."""

    def __init__(self) -> None:
        from comfy_kitchen.backends import eager

        @wraps(eager.int8_linear)
        def int8_linear(*args: Any, **kwargs: Any) -> Tensor:
            self.calls += 1
            with _disable_current_modes():
                found = eager.int8_linear(*args, **kwargs)
            out = torch.empty(found.shape, dtype=found.dtype)
            with _disable_current_modes():
                out.copy_(found)
            return out

        self.calls, self.int8_linear = 0, int8_linear


@pytest.fixture
def past() -> Any:
    registry = kitchen.registry
    reason = registry.list_backends()["cuda"]["unavailable_reason"]
    found = Past()
    registry.register("cuda", found, {"int8_linear": None})
    yield found
    del registry._backends["cuda"], registry._capabilities["cuda"]
    registry.mark_unavailable("cuda", reason or "")


class Layer(nn.Module):
    """x [B, T, width] through an int8 layer, which applies GELU to its input. heard: by torch's own operation."""

    def __init__(self, heard: bool = False, act: str = "gelu_tanh", width: int = 16, **more: Any) -> None:
        super().__init__()
        self.heard, self.more = heard, {"input_act": act} | more
        shape = (width, width // 2 if act == "swiglu" else width)
        weight = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", torch.tensor(1e-2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(x)
        if self.heard:
            y = torch.ops.comfy_kitchen.int8_linear(F.gelu(y), self.weight, self.scale, None, 0)
        else:
            y = kitchen.int8_linear(y, self.weight, self.scale, None, torch.float32, **self.more)
        return y + x


def recorded(model: nn.Module, x: Tensor) -> tuple[Tensor, Tape | None, str]:
    recorder = Recorder([x], model, x.device)
    with torch.inference_mode():
        out, tape = record(lambda: model(x), recorder)
    return out, tape, recorder.refusal


@pytest.mark.parametrize("heard", [False, True])
def test_a_call_past_torch_is_a_call_on_the_tape(past: Past, heard: bool) -> None:
    model, x = Layer(heard), torch.randn(1, 7, 16)
    out, tape, refusal = recorded(model, x)
    assert tape is not None, refusal
    assert past.calls == 1 and torch.equal(out, model(x))
    names = [str(operation.func) for operation in tape.operations]
    assert sum("int8_linear" in name for name in names) == 1 and not any("empty" in name for name in names)
    program = Program(tape, fuse=False)
    program.bind(model)
    for rows in range(1, 3):
        x = torch.randn(1, 7, 16) * rows
        assert torch.equal(program.run([x]), model(x))


@pytest.mark.parametrize(("act", "names"), [("gelu_tanh", {"gelu"}), ("swiglu", {"silu", "mul"}), ("none", set())])
def test_an_activation_comes_out_of_a_layer(past: Past, act: str, names: set[str]) -> None:
    """So that it fuses with the rounding of the layer's input. What is left is the operation that torch hears."""
    from anyshape.accel.tape.rules.kitchen import decompose

    model = Layer(act=act)
    _, tape, refusal = recorded(model, torch.randn(1, 7, 16))
    assert tape is not None, refusal
    assert decompose(tape) == "" and not any(operation.opaque for operation in tape.operations)
    assert {operation.traits.name for operation in tape.operations} >= names | {"int8_linear", "silu", "add"}
    program = Program(tape, fuse=False)
    program.bind(model)
    for rows in range(1, 3):
        x = torch.randn(1, 7, 16) * rows
        assert torch.equal(program.run([x]), model(x))


def test_what_a_layer_does_besides_is_left_to_the_library(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    """It turns an input together with its activation; a newer version adds a residual."""
    from anyshape.accel.tape.rules.kitchen import decompose

    own = past.int8_linear

    def newer(x, weight, weight_scale, bias=None, out_dtype=None, convrot=False, convrot_groupsize=256,
              input_act=None, residual=None, **rest) -> Tensor:  # fmt: skip
        out = own(x, weight, weight_scale, bias, out_dtype, convrot, convrot_groupsize, input_act)
        return out if residual is None else out + residual

    class Adds(Layer):
        def forward(self, x: Tensor) -> Tensor:
            linear, added = kitchen.registry.get_implementation("int8_linear", kwargs={"x": x}), self.added(x)
            return linear(x, self.weight, self.scale, None, torch.float32, input_act="gelu_tanh", residual=added)

    turned = Layer(width=256, convrot=True)
    adds, same = Adds(), Adds()
    adds.added, same.added = (lambda x: x), (lambda x: None)
    for model, left, function in ((turned, 1, own), (adds, 1, newer), (same, 0, newer)):
        monkeypatch.setattr(past, "int8_linear", function)
        _, tape, refusal = recorded(model, torch.randn(1, 7, model.weight.shape[1]))
        assert tape is not None, refusal
        decompose(tape)
        assert sum(operation.opaque for operation in tape.operations) == left
        program, x = Program(tape, fuse=False), torch.randn(1, 7, model.weight.shape[1])
        program.bind(model)
        assert torch.equal(program.run([x]), model(x))


def test_an_implementation_that_is_called_otherwise(past: Past) -> None:
    """The library asks for it by names, and calls it by place."""

    class Asks(Layer):
        def forward(self, x: Tensor) -> Tensor:
            given = {"x": x, "weight": self.weight, "weight_scale": self.scale, "bias": None}
            linear = kitchen.registry.get_implementation("int8_linear", kwargs=given)
            return linear(x, self.weight, self.scale, out_dtype=torch.float32) + x

    model, x = Asks(), torch.randn(1, 7, 16)
    _, tape, refusal = recorded(model, x)
    assert tape is not None, refusal
    program = Program(tape, fuse=False)
    program.bind(model)
    assert torch.equal(program.run([x * 2]), model(x * 2))


def test_the_librarys_choice_is_its_own_again(past: Past) -> None:
    """After a forward that failed, and on other threads meanwhile. No argument is held."""
    from anyshape.accel.tape import library_calls

    from tools.driving import in_threads

    registry, chosen = kitchen.registry, []

    class Fails(Layer):
        def forward(self, x: Tensor) -> Tensor:
            in_threads(lambda _: chosen.append(registry.get_capable_backend("int8_linear")), [0])
            super().forward(x)
            raise ValueError

    with pytest.raises(ValueError):
        recorded(Fails(), torch.randn(1, 7, 16))
    chosen.append(registry.get_capable_backend("int8_linear"))
    assert chosen == ["cuda", "cuda"]
    assert library_calls._HERE.recorder is None and library_calls._HERE.given is None


def test_without_kernels_the_library_is_left_alone() -> None:
    """Its plain torch is heard, operation by operation."""
    model, x = Layer(), torch.randn(1, 7, 16)
    _, tape, refusal = recorded(model, x)
    assert tape is not None, refusal
    assert not any("int8_linear" in str(operation.func) for operation in tape.operations)
