"""Which attention backend a fused program calls: what is measured, remembered, and left as it was recorded.

No GPU here: tapes hold values of tensors on torch's meta device, and how long a backend takes is made up.
"""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("pack")

CUDA = torch.device("cuda", 0)
FAST = {"cudnn": 1.0, "flash": 2.0, "efficient": 3.0}  # milliseconds
FLASH, CUDNN, EFFICIENT = ("flash", "cudnn", "efficient")
aten = torch.ops.aten


class Card:
    """What there is to ask a card, and how often it was."""

    def __init__(self, patch) -> None:
        from anyshape.accel.tape import attention_choice
        from anyshape.accel.tape.rules import attention as rule

        self.times, self.able, self.timed, self.capability = dict(FAST), set(FAST), [], (8, 9)
        patch.setattr(attention_choice, "_KNOWN", {})
        patch.setattr(attention_choice, "_milliseconds", self._milliseconds)
        patch.setattr(attention_choice.Case, "tensors", lambda case, device: [torch.empty(1, 1, 1, 1)] * 3 + [None])
        for module in (attention_choice, rule):
            patch.setattr(module, "supports", lambda backend, *tensors: backend in self.able)
        patch.setattr(rule.torch, "empty_strided", lambda *form, **kind: torch.empty(0))
        patch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
        patch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)

    def _milliseconds(self, backend, tensors, causal) -> float:
        self.timed.append(backend)
        return self.times[backend]


@pytest.fixture
def card(monkeypatch):
    return Card(monkeypatch)


def tape_of(backend, length=4096, masked=False, heads_of_keys=24):
    """One attention of 24 heads on ``backend``, as it is recorded, and the whole tape."""
    from anyshape.accel.tape.values import Input, Operation, Tape, Value

    shapes = [(1, 24, length, 128), (1, heads_of_keys, length, 128), (1, heads_of_keys, length, 128)]
    tensors = [torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in shapes]
    if masked:
        tensors.append(torch.empty(1, 24, length, length, device="meta", dtype=torch.bfloat16))
    values = [Value(tensor, index, Input(index)) for index, tensor in enumerate(tensors)]
    func = getattr(aten, f"_scaled_dot_product_{backend}_attention").default
    if backend == FLASH:
        args = (*values, 0.0, False)
    else:
        args = (*values[:3], values[3] if masked else None, False, 0.0, False)
    operation = Operation(func, args, {"scale": 0.5}, values)
    for number, tensor in enumerate((torch.empty_like(tensors[0]), torch.empty(1, 24, length, device="meta"))):
        operation.outputs.append(Value(tensor, 10 + number))
        operation.outputs[-1].origin = operation
    return operation, Tape([operation], values, operation.outputs[0], CUDA)


def chosen(*args, **named):
    """The backend of the only operation, after the rule; what the rule says."""
    from anyshape.accel.tape.rules.attention import take_fastest

    operation, tape = tape_of(*args, **named)
    said = take_fastest(tape)
    return (operation.func.backend if operation.opaque else args[0]), bool(said)


def test_the_fastest_is_taken_and_said(card):
    assert chosen(FLASH) == (CUDNN, True)
    assert chosen(CUDNN) == (CUDNN, False)  # as recorded: nothing is less exact


def test_cudnns_is_not_measured(card):
    """It is the fastest where torch takes it by itself, and measuring costs a first call most of a second."""
    assert chosen(CUDNN) == (CUDNN, False) and not card.timed


def test_on_hopper_it_is_taken_unmeasured(card):
    """But for short calls, whose plans cost more than is won, and for forms that nobody measured."""
    card.capability = (9, 0)
    assert chosen(FLASH) == (CUDNN, True) and chosen(FLASH, 512) == (FLASH, False) and not card.timed
    assert chosen(EFFICIENT, masked=True) == (CUDNN, True) and card.timed
    card.able = {FLASH}
    assert chosen(FLASH) == (FLASH, False)


def test_small_sizes_have_the_steps_of_large_ones(card):
    """Whichever backend runs, so that the plan of one size fits the other."""
    from anyshape.accel.tape.rules import attention

    card.capability = (9, 0)
    found = {}
    for length in (512, 1024):
        operation, tape = tape_of(FLASH, length)
        attention.take_fastest(tape)
        found[operation.func.backend] = operation.func.likeness
    assert found.keys() == {FLASH, CUDNN} and found[FLASH] == found[CUDNN]


def test_what_is_as_fast_stays_as_it_was(card):
    card.times[CUDNN] = 1.97
    assert chosen(FLASH) == (FLASH, False)


def test_a_backend_that_cannot_is_none(card):
    card.able = {FLASH, EFFICIENT}
    card.times[EFFICIENT] = 1.0
    assert chosen(FLASH) == (EFFICIENT, True)
    assert CUDNN not in card.timed


def test_a_form_that_the_fastest_refuses(card):
    """It can in general, so it was measured, and not for tensors that lie like these."""
    assert chosen(FLASH) == (CUDNN, True)
    card.able = {FLASH}
    assert chosen(FLASH) == (FLASH, False)


def test_a_case_is_measured_once(card):
    """Lengths of a kind, and every block: one measurement. Masks, grouped heads and short prompts: others."""
    for length in (4096, 4095, 4250, 16384):
        assert chosen(FLASH, length)[0] == CUDNN
    assert sorted(card.timed) == sorted(FAST)
    chosen(EFFICIENT, masked=True), chosen(FLASH, heads_of_keys=8), chosen(FLASH, 77)
    assert len(card.timed) == 4 * len(FAST)


def test_what_the_user_switched_off_is_another_choice(card):
    """Nothing that was remembered without a backend counts once it is there again."""
    assert chosen(FLASH)[0] == CUDNN
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        card.able = {FLASH, EFFICIENT}
        assert chosen(FLASH)[0] == FLASH
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    card.able = set(FAST)
    assert chosen(FLASH)[0] == CUDNN


def test_a_choice_is_remembered_on_disk(card, monkeypatch, tmp_path):
    """Another process takes it, whatever it would measure itself; damaged, it is measured again."""
    from anyshape.accel.artifacts import compiled_for
    from anyshape.accel.artifacts.keeper import Keeper
    from anyshape.accel.stats import STATS, ArtifactStats
    from anyshape.accel.tape import attention_choice

    monkeypatch.setattr(STATS, "artifacts", ArtifactStats())
    monkeypatch.setattr(compiled_for, "architecture", lambda device: "sm_90")
    monkeypatch.setenv("ANYSHAPE_ARTIFACTS_MB", "8")
    monkeypatch.setenv("ANYSHAPE_ARTIFACTS_KEY", "s" * 64)

    def start():
        monkeypatch.setattr(attention_choice, "_KNOWN", {})
        monkeypatch.setattr(attention_choice, "KEEPER", Keeper())
        attention_choice.KEEPER.use(tmp_path / "store")

    start()
    assert chosen(FLASH)[0] == CUDNN and (STATS.artifacts.saved, STATS.artifacts.loaded) == (1, 0)
    card.times, card.timed = {CUDNN: 9.0, FLASH: 1.0, EFFICIENT: 9.0}, []
    start()
    assert chosen(FLASH)[0] == CUDNN and card.timed == []
    assert (STATS.artifacts.saved, STATS.artifacts.loaded, STATS.artifacts.rejected) == (1, 1, [])
    next((tmp_path / "store").glob("*/times.json")).write_text("{}")
    start()
    assert chosen(FLASH)[0] == FLASH and sorted(card.timed) == sorted(FAST)
    assert STATS.artifacts.saved == 2 and len(STATS.artifacts.rejected) == 1


@pytest.mark.parametrize("backend", FAST)
def test_a_backend_that_refuses_costs_nothing(backend):
    """None of the three runs on a CPU: the recorded operation does, and the first refusal is the last."""
    from anyshape.accel.tape import attention_choice
    from anyshape.accel.tape.rules.attention import Attention

    own, q = aten._scaled_dot_product_flash_attention_for_cpu.default, torch.randn(2, 3, 5, 16)
    with torch.inference_mode():
        wanted = own(q, q, q, 0.0, False, attn_mask=None, scale=0.3)[0]
        other = Attention(own, backend, wanted.stride())
        with pytest.raises(RuntimeError):
            attention_choice.attend(backend, q, q, q, None, False, 0.3)
        for _ in range(2):
            assert torch.equal(other(q, q, q, 0.0, False, attn_mask=None, scale=0.3), wanted)
        assert other.backend == ""


def test_a_result_lies_as_it_was_recorded(monkeypatch):
    """The efficient backend gives tokens first where the others follow the queries."""
    from anyshape.accel.tape.rules import attention

    out = torch.randn(2, 5, 3, 16).transpose(1, 2)
    monkeypatch.setattr(attention, "attend", lambda *arguments: out)
    own = aten._scaled_dot_product_flash_attention.default
    for stride in (out.stride(), out.contiguous().stride()):
        found = attention.Attention(own, EFFICIENT, stride)(out, out, out, 0.0, False, scale=None)
        assert found.stride() == stride and torch.equal(found, out)


def test_how_far_single_pictures_are_apart_is_no_other_place(monkeypatch):
    """torch writes any stride for a dimension of 1; a copy of the same memory was made for that."""
    from anyshape.accel.tape.rules import attention

    out = torch.randn(1, 5, 3, 16).transpose(1, 2)
    odd = out.as_strided(out.shape, (7, *out.stride()[1:]))
    monkeypatch.setattr(attention, "attend", lambda *arguments: odd)
    own = aten._scaled_dot_product_flash_attention.default
    found = attention.Attention(own, EFFICIENT, out.stride())(out, out, out, 0.0, False, scale=None)
    assert found is odd


@pytest.mark.parametrize("length", [16, 77, 80])
def test_a_mask_is_laid_as_the_kernel_loads_it(length):
    from anyshape.accel.tape.attention_choice import ALIGNED, aligned

    mask = torch.randn(1, 1, 5, length + 3)[..., :length]
    found = aligned(mask)
    assert torch.equal(found, mask) and all(step % ALIGNED == 0 for step in found.stride()[:-1])
    assert aligned(found) is found


def repeated(backend, times=(4, 4), dim=1, masked=False):
    """A tape of attention whose keys and values are heads repeated, and the values that were."""
    from anyshape.accel.tape.values import Operation

    operation, tape = tape_of(backend, masked=masked, heads_of_keys=6)
    own = operation.args[1:3]
    made = []
    for number, (value, count) in enumerate(zip(own, times, strict=True)):
        tensor = torch.empty(1, 24, 4096, 128, device="meta", dtype=torch.bfloat16)
        made.append(Operation(aten.repeat_interleave.self_int, (value, count, dim), {}, [value]))
        made[-1].outputs.append(type(value)(tensor, 20 + number))
        made[-1].outputs[0].origin = made[-1]
    twins = [operation.args[0], *(each.outputs[0] for each in made), *operation.args[3:]]
    operation.args, operation.inputs = tuple(twins), [*twins[:3], *operation.inputs[3:]]
    tape.operations[:0] = made
    return operation, tape, own


@pytest.mark.parametrize("backend", [CUDNN, FLASH])
@pytest.mark.parametrize("taken", [False, True])
def test_heads_that_are_shared_are_not_copied(card, backend, taken):
    """Whether another backend was taken before or not; nobody repeats them any more."""
    from anyshape.accel.tape.rules import attention, edits, shared_heads

    operation, tape, own = repeated(backend)
    if taken:
        attention.replace(operation, FLASH)
    assert shared_heads.share(tape) == ""
    assert operation.args[1:3] == own and operation.inputs[1:3] == list(own) and operation.func.shared == 4
    edits.settle(tape)
    assert tape.operations == [operation] and tape.outputs == operation.outputs


@pytest.mark.parametrize(
    "case",
    [
        {"backend": EFFICIENT}, {"backend": CUDNN, "masked": True}, {"backend": CUDNN, "dim": 2},
        {"backend": CUDNN, "times": (4, 2)},
    ],
    ids=str,
)  # fmt: skip
def test_other_copies_of_heads_stay(card, case):
    """Of a backend that cannot, with a mask, in other dimensions, of unlike numbers."""
    from anyshape.accel.tape.rules import shared_heads

    operation, tape, _ = repeated(**case)
    before = list(operation.inputs)
    assert shared_heads.share(tape) == "" and operation.inputs == before and len(tape.operations) == 3


def test_copies_of_heads_that_somebody_else_reads_stay(card):
    from anyshape.accel.tape.rules import shared_heads
    from anyshape.accel.tape.values import Operation

    operation, tape, _ = repeated(CUDNN)
    tape.operations.append(Operation(aten.neg.default, (operation.inputs[1],), {}, [operation.inputs[1]]))
    assert shared_heads.share(tape) == "" and operation.inputs[1].origin.outputs == [operation.inputs[1]]


def test_shared_heads_are_repeated_where_a_kernel_refuses_them():
    from anyshape.accel.tape.rules.attention import Attention

    calls = []

    def own(q, k, v):
        calls.append(k.shape[1])
        if k.shape[1] != q.shape[1]:
            raise RuntimeError("as many heads, please")
        return (torch.nn.functional.scaled_dot_product_attention(q, k, v),)

    q, k = torch.randn(2, 6, 5, 16), torch.randn(2, 3, 7, 16)
    called = Attention(own, "", q.stride())
    called.shared = 2
    wanted = own(q, k.repeat_interleave(2, 1), k.repeat_interleave(2, 1))[0]
    calls.clear()
    for _ in range(2):
        assert torch.equal(called(q, k, k), wanted)
    assert calls == [3, 6, 6]
