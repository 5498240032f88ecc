"""What the recorder refuses, because a replay could not repeat it. Each would be wrong without the refusal.

Plain torch modules on the CPU, no ComfyUI.
"""

import ctypes
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools import embed

embed.bare_pack()

from anyshape.accel.tape.kept import kept_tensor  # noqa: E402 - the package exists from the line above on
from anyshape.accel.tape.record import Recorder, record  # noqa: E402

from tools.small_forwards import CPU, inputs, module, replayed_right, taped  # noqa: E402


def refused(forward, word: str, **attributes) -> str:
    """The reason; the forward's own result is eager's all the same, and random numbers go on as in eager."""
    states = []
    results = []
    for recorded in (False, True):
        model, x = module(forward, **attributes), inputs(0)
        recorder = Recorder([x], model, CPU)
        torch.manual_seed(3)
        with torch.inference_mode():  # recorded here: the reason names a line of this file
            out, tape = record(lambda model=model, x=x: model(x), recorder) if recorded else (model(x), None)
        assert tape is None
        results.append(out)
        states.append(torch.get_rng_state())
    assert torch.equal(results[0], results[1]) and torch.equal(states[0], states[1])
    why = recorder.refusal
    assert word in why, why
    assert "test_tape_record.py:" in why or "unknown place" in why
    return why


@pytest.mark.parametrize(
    ("forward", "word"),
    [
        (lambda self, x: x * x.sum().item(), "host"),
        (lambda self, x: x * x.tolist()[0][0], "host"),
        (lambda self, x: x * 2 if bool(x.sum() > 0) else x * 3, "host"),
        (lambda self, x: x * float(x.max()), "host"),
        (lambda self, x: x * x.numpy().max().item(), "host"),
        (lambda self, x: x[: int((x > 0).sum())] * 2, "host"),
        (lambda self, x: x.nonzero().float(), "values"),
        (lambda self, x: x[x > 0], "values"),
        (lambda self, x: torch.where(x > 0)[0] * 2, "values"),
        (lambda self, x: x.repeat_interleave((x[:, 0] > 0).long() + 1, dim=0), "values"),
        (lambda self, x: F.one_hot((x > 0).long()).float(), "values"),
    ],
)
def test_a_value_that_comes_back(forward, word) -> None:
    assert "tests/test_tape_record.py" in refused(forward, word)


def test_the_reason_names_the_line() -> None:
    def forward(self, x):
        return x * x.sum().item()

    line = forward.__code__.co_firstlineno + 1
    assert f"test_tape_record.py:{line})" in refused(forward, "host")


def through_numpy(self, x):
    out = torch.empty(3, 4)
    out.numpy()[:] = numpy.ones((3, 4))
    return out + x


def into(out, x):
    """As a library's kernel writes: twice ``x``."""
    source = x * 2
    ctypes.memmove(out.data_ptr(), source.data_ptr(), 48)
    return out


def past(x):
    return into(torch.empty_like(x), x)


def part(out, x):
    out[1:] = x[1:]
    return out


def to_nothing(self, x):
    """As memory-saving attention multiplies: what it would add to is never read."""
    return torch.baddbmm(torch.empty(1, 1, 1), x[None], x.T[None], beta=0, alpha=0.5) + 1


def to_something(self, x):
    return torch.baddbmm(torch.empty(1, 1, 1), x[None], x.T[None], beta=0.5)


def test_memory_that_a_product_ignores() -> None:
    replayed_right(to_nothing)
    _, tape, why = taped(module(to_something), inputs(0))
    assert tape is None and "bypassed torch's dispatcher" in why


@pytest.mark.parametrize(
    "forward",
    [
        through_numpy,
        lambda self, x: past(x) * 2,
        lambda self, x: (x + 1).addcmul_(past(x), x),
        lambda self, x: (x + 1).copy_(past(x)),
        lambda self, x: past(x).mul_(x),
        lambda self, x: past(x).view(12).add_(x.view(12)),
        lambda self, x: past(x).double() + x,
        lambda self, x: past(x).T.contiguous() + x.T,
        lambda self, x: past(x).reshape(12).to(torch.bfloat16) + x.view(12),
        lambda self, x: torch.add(past(x), x, out=torch.empty(3, 4)),
        lambda self, x: into(torch.zeros_like(x), x) * 2 + x,
        lambda self, x: into(torch.ones(3, 4), x).mul_(x),
        lambda self, x: into(torch.zeros(3, 4), x).view(12).add_(x.view(12)),
        lambda self, x: part(into(torch.zeros_like(x), x), x),
    ],
)
def test_memory_written_past_the_dispatcher(forward) -> None:
    """However it is read then, or written into: it would stay what it was in the first call."""
    refused(forward, "bypassed torch's dispatcher")


def test_memory_that_is_written_over() -> None:
    def forward(self, x):
        out = torch.empty(12).unsqueeze_(0).view(3, 4)
        out[1:].copy_(x[1:])
        out[0] = x[0] * 2
        return torch.add(out, x, out=torch.empty(3, 4)) + torch.empty(3, 4).fill_(2).addcmul_(x, x)

    replayed_right(forward)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x + torch.randn_like(x),
        lambda self, x: x + torch.rand(4),
        lambda self, x: F.dropout(x, 0.5, training=True),
        lambda self, x: (x * 0).normal_() + x,
        lambda self, x: x + torch.bernoulli(x.sigmoid()),
        lambda self, x: x * (random.random() * 0 + 1),
        lambda self, x: x * float(numpy.random.rand() * 0 + 1),
    ],
)
def test_random_numbers(forward) -> None:
    refused(forward, "random")


def test_attention_without_dropout_is_not_random() -> None:
    replayed_right(lambda self, x: F.scaled_dot_product_attention(x[None], x[None], x[None]) + F.dropout(x, 0.5, False))


def attends(self, x, mask=None):
    q = torch.stack([x.sin(), x.cos(), x])[None]  # [1, 3, 3, 4]
    return F.scaled_dot_product_attention(q, q + self.scale, q * self.scale, attn_mask=mask)


def attends_by_the_formula(self, x):
    """As newer versions of ComfyUI ask for a backend: for one call."""
    with sdpa_kernel([SDPBackend.MATH], set_priority=True):
        return attends(self, x)


def attends_under_a_mask(self, x):
    return attends(self, x, x @ x.T > 0)


@pytest.mark.parametrize("forward", [attends, attends_by_the_formula, attends_under_a_mask])
def test_attention_is_repeated_on_the_backend_that_ran(forward) -> None:
    """Also where that was switched around the call: a replay has no such context, and another one rounds otherwise."""
    with torch.inference_mode():
        x = inputs(0)
        assert not torch.equal(attends(module(attends), x), attends_by_the_formula(module(attends), x))
    replayed_right(forward)
    tape = taped(module(forward), inputs(0))[1]
    names = [str(operation.func) for operation in tape.operations if "attention" in str(operation.func)]
    assert len(names) == 1 and ("math" in names[0]) == (forward is attends_by_the_formula)


def test_attention_with_dropout_draws() -> None:
    refused(lambda self, x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5), "random")


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x.mul_(1.0) * 2,
        lambda self, x: x[0].zero_() + x,
        lambda self, x: self.lin.weight.mul_(1.0) @ x.T,
        lambda self, x: self.table.copy_(x) + 1,
        lambda self, x: torch.add(x, 1, out=x),
        lambda self, x: x.t_().t_() * 2,
    ],
)
def test_writes_into_inputs_and_weights(forward) -> None:
    refused(forward, "input or a weight")


def keeps(self, x):
    self.last = x * 2
    return self.last + 1


def keeps_in_a_dict(self, x):
    self.cache["h"] = [x * 2]
    return x + 1


def keeps_by_name(self, x):
    self.saved = x * 2
    return x + getattr(self, "saved")  # noqa: B009


def keeps_in_a_buffer(self, x):
    self.table = x + 1
    return x * self.table


@pytest.mark.parametrize("forward", [keeps, keeps_in_a_dict, keeps_by_name, keeps_in_a_buffer])
def test_a_tensor_kept_for_the_next_call(forward) -> None:
    refused(forward, "keeps", cache={})


def test_a_tensor_that_the_model_only_shows() -> None:
    """Cosmos keeps a dict of activations that nothing reads. What another pack's class writes, its code may read."""

    def forward(self, x):
        shown = {"x": x.detach()}
        self.shown = shown
        return x * 2

    replayed_right(forward, "comfy.ldm.cosmos.model")
    refused(forward, "keeps a tensor")


def test_what_all_parts_share_is_looked_through_once() -> None:
    """With DynamicVRAM ComfyUI gives every layer the same dict, which grows with the layers: 788,000 looks for LTX."""
    shared, looks = {"stack": [torch.zeros(1) for _ in range(40)]}, []
    model = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(50)])
    for part in model:
        part._pin_state = shared
    assert kept_tensor(model, lambda tensor: bool(looks.append(tensor))) == ""
    assert len(looks) == 40


def test_a_cache_that_was_there() -> None:
    number = torch.tensor(2.0)

    def written(self, x):
        out = x * 1
        out[0] = number
        return out

    refused(written, "cache")
    refused(lambda self, x: x * number, "cache")
    refused(lambda self, x: torch.stack([number * 1, x.sum()]), "cache")
    cached = [torch.ones(4)]
    refused(lambda self, x: x + self.cache[0], "cache", cache=cached)
    refused(lambda self, x: x + cached[0], "cache")


def test_a_table_made_at_the_first_call_is_a_constant() -> None:
    """It depends on sizes alone; a later recording finds it there."""

    def forward(self, x):
        key = tuple(x.shape)
        if key not in self.cache:
            self.cache[key] = torch.arange(x.shape[-1]).float()
        return x * self.cache[key]

    replayed_right(forward, cache={})
    model = module(forward, cache={})
    assert [taped(model, inputs(0))[2], taped(model, inputs(1))[2]] == ["", ""]
    assert taped(module(forward, cache={(3, 4): torch.ones(4)}), inputs(0))[1] is None


def test_several_writes_at_once_and_resizes() -> None:
    def several(self, x):
        values, indices = torch.empty(3), torch.empty(3, dtype=torch.long)
        torch.max(x, 1, out=(values, indices))
        return values + indices

    def resized(self, x):
        out = (x * 1).resize_(2, 4)
        return out + 1

    def laid_out(self, x):
        return (x * 1).as_strided_((3, 4), (1, 3)) + 1

    def grown(self, x):
        out = torch.empty(0)
        torch.add(x, 1, out=out)
        return out * 2

    refused(several, "several")
    refused(resized, "lies")
    refused(laid_out, "lies")
    refused(grown, "lies")


def test_a_result_that_is_the_same_for_every_input() -> None:
    refused(lambda self, x: torch.zeros(3), "depend")


def test_a_fault_of_the_recorder_costs_the_tape_only(monkeypatch) -> None:
    from anyshape.accel.tape import aliasing
    from anyshape.accel.tape.tensors import Tensors

    def broken(*_):
        raise RuntimeError("broken")

    forward = lambda self, x: self.lin(x) * 2  # noqa: E731
    for owner, name in ((Recorder, "_append"), (Tensors, "value"), (aliasing, "settle")):
        with monkeypatch.context() as patch:
            model, x = module(forward), inputs(0)
            recorder = Recorder([x], model, CPU)
            patch.setattr(owner, name, broken)
            out, tape = record(lambda model=model, x=x: model(x), recorder)
            assert tape is None and "broken" in recorder.refusal
            assert torch.equal(out, model(x))


def test_an_error_of_the_model_is_its_own() -> None:
    def forward(self, x):
        raise ValueError("the model's")

    with pytest.raises(ValueError, match="the model's"):
        taped(module(forward), inputs(0))
