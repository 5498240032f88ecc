"""comfy-kitchen's functions that models of newer ComfyUI call, on a tape: as they are, to the bit, and in a graph.

Some are operations of torch's, the others are known to the library's registry alone.
"""

import inspect

import pytest
import torch
from torch import nn

kitchen = pytest.importorskip("comfy_kitchen")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("pack")]

ROWS, WIDTH = 512, 512  # tokens, channels
W4A8 = "qdata", "s_rel", "s_channel", "correction", "codebook"


def heads(x):
    """[1, 4, ROWS, WIDTH / 4]."""
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


def grid(x, *sizes):
    """[1, *sizes, 4, WIDTH / 4]."""
    return x.reshape(1, *sizes, 4, -1)


def video(x):
    """[1, WIDTH, 4, 8, 16], channels last."""
    return x.transpose(1, 2).unflatten(-1, (4, 8, 16)).contiguous(memory_format=torch.channels_last_3d)


class Calls(nn.Module):
    """A function between two operations of torch's. x [1, ROWS, WIDTH] bfloat16."""

    def __init__(self, function):
        super().__init__()
        draw = torch.Generator("cuda").manual_seed(0)
        randn = lambda *shape: torch.randn(shape, generator=draw, device="cuda")  # noqa: E731
        own = {
            "norm": randn(WIDTH).bfloat16(),
            "square": randn(WIDTH, WIDTH).half(),
            "weight": (randn(WIDTH, WIDTH) * 40).clamp(-127, 127).to(torch.int8),
            "scale": torch.full((), 1e-3, device="cuda"),
            "filters": (randn(WIDTH, WIDTH, 3, 3, 3) * 0.02).half(),
        }
        if hasattr(kitchen, "quantize_w4a8_int8_weight"):
            quantised = kitchen.quantize_w4a8_int8_weight(randn(512, WIDTH).bfloat16())
            own |= dict(zip(W4A8, quantised, strict=True))
        for name, tensor in own.items():
            self.register_buffer(name, tensor)
        self.function = function

    def forward(self, x):
        return self.function(self, x * 2) + 1

    def int8_attention(self, x):
        return kitchen.int8_attention(heads(x), heads(x * 2), heads(x + 1))

    def int8_linear(self, x, **more):
        return kitchen.int8_linear(x, self.weight, self.scale, None, x.dtype, **more)

    def normed_int8_linear(self, x):
        return self.int8_linear(x, input_act="rms_norm", input_act_weight=self.norm, input_act_eps=1e-6)

    def added_int8_linear(self, x):
        return self.int8_linear(x, convrot=True, residual=x, residual_scale=self.norm)

    def int8_linear_modulated(self, x):
        return kitchen.int8_linear_modulated(x, self.norm[None], self.weight, self.scale, None, x.dtype)

    def int8_linear_rms_modulated(self, x):
        given = self.norm, 1e-6, self.norm[None], self.weight, self.scale
        return kitchen.int8_linear_rms_modulated(x, *given, None, x.dtype, convrot=True)

    def rms_gated_residual(self, x):
        return kitchen.rms_gated_residual(x * 2, self.norm, x, self.norm)

    def fp16_linear(self, x):
        return kitchen.fp16_linear(x.half().repeat(1, 128, 1), self.square)

    def w4a8_int8_linear(self, x):
        return kitchen.w4a8_int8_linear(x, **{name: getattr(self, name) for name in W4A8})

    def na2d(self, x):
        return kitchen.na2d(*(grid(x * n, 16, 32) for n in (1, 2, 3)), 7)

    def na3d(self, x):
        return kitchen.na3d(*(grid(x * n, 4, 8, 16) for n in (1, 2, 3)), [3, 3, 3], [False] * 3)

    def group_norm_silu_pad3d(self, x):
        """Into memory that the caller has made."""
        out = torch.empty((1, WIDTH, 4, 8, 16), dtype=x.dtype, device=x.device, memory_format=torch.channels_last_3d)
        return kitchen.group_norm_silu_pad3d(video(x), self.norm, self.norm, out=out)

    def fp16_conv3d(self, x):
        return kitchen.fp16_conv3d(video(x.half()), self.filters)


NEWER = {Calls.normed_int8_linear: "input_act_weight", Calls.added_int8_linear: "residual"}  # arguments of int8_linear
FUNCTIONS = [
    Calls.int8_attention, Calls.int8_linear, *NEWER, Calls.int8_linear_modulated, Calls.int8_linear_rms_modulated,
    Calls.rms_gated_residual, Calls.fp16_linear, Calls.w4a8_int8_linear, Calls.na2d, Calls.na3d,
    Calls.group_norm_silu_pad3d, Calls.fp16_conv3d,
]  # fmt: skip
PLAIN = (Calls.na2d, Calls.na3d)  # where the library has no kernel for a size, they copy numbers from the host


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_is_a_step_that_a_graph_may_hold(function):
    from anyshape.accel.tape import rules
    from anyshape.accel.tape.program import Program
    from anyshape.accel.tape.record import Recorder, record

    has = hasattr(kitchen, function.__name__)
    if argument := NEWER.get(function):
        has = argument in inspect.signature(kitchen.int8_linear).parameters
    if not has:
        pytest.skip("this comfy-kitchen has no such function")
    model, draw = Calls(function), torch.Generator("cuda").manual_seed(1)
    randn = lambda: torch.randn(1, ROWS, WIDTH, generator=draw, device="cuda").bfloat16()  # noqa: E731
    x = randn()
    with torch.inference_mode():
        model(x)  # libraries may prepare something at a first call
        recorder = Recorder([x], model, x.device)
        out, tape = record(lambda: model(x), recorder)
        assert tape is not None, recorder.refusal
        assert torch.equal(out, model(x)) and rules.apply(tape) == []
        program = Program(tape, fuse=True)
        program.bind(model)
        x = randn()
        assert torch.equal(program.run([x]), model(x))
        if function in PLAIN:
            return
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            program.run([x])
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = program.run([x])
        x.copy_(randn())
        graph.replay()
        assert torch.equal(out, model(x))
