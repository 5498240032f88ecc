"""What keeps a fault of ours from costing an image: one place for failures, and a look at each shape's first result."""

import gc
import weakref

import pytest
import torch

from tools import embed
from tools.oracles import fallbacks

embed.bare_pack()

from anyshape.accel import stats, verify  # noqa: E402 - the package exists from the line above on
from anyshape.accel.attempt import Fallback, attempt, failed  # noqa: E402
from anyshape.accel.errors import WrongResult, is_out_of_memory  # noqa: E402

X = torch.randn(2, 4, 8, 8)
pytestmark = pytest.mark.usefixtures("own_stats")


class Interrupt(Exception):
    """Stands for the user's."""


@pytest.fixture
def own_stats(monkeypatch):
    """Counters of the test's own."""
    own = stats.Stats()
    for module in ("stats", "attempt"):
        monkeypatch.setattr(f"anyshape.accel.{module}.STATS", own)
    return own


# Failures ---------------------------------------------------------------------------------------------------------


def failing(error):
    def fail():
        raise error

    return fail


def test_an_attempt_that_succeeds() -> None:
    assert attempt(lambda: 5, lambda error: "not called") == (5, "")


def test_an_attempt_that_fails() -> None:
    assert attempt(failing(ValueError("why")), str) == (None, "why")
    assert attempt(failing(ValueError()), str) == (None, "ValueError")


def test_a_message_passes_through() -> None:
    with pytest.raises(Interrupt):
        attempt(failing(Interrupt()), str, (Interrupt,))
    with pytest.raises(KeyboardInterrupt):
        attempt(failing(KeyboardInterrupt()), str)


def test_a_fault_of_ours_is_rescued_and_counted() -> None:
    fallback = Fallback(lambda: "image")
    assert fallback.rescue(failing(ValueError("bug")), failed("UNet", "a forward")) == "image"
    (counted,) = fallbacks()
    assert counted["where"] == "UNet" and "ValueError: bug" in counted["reason"] and counted["count"] == 1


def test_a_fault_of_theirs_is_the_users_to_see() -> None:
    fallback = Fallback(failing(ValueError("their own")))
    with pytest.raises(ValueError, match="their own"):
        fallback.rescue(fallback, failed("UNet", "a forward"))
    assert not fallbacks() and fallback.error is None


def test_a_fault_of_theirs_leaves_no_cycle() -> None:
    """Its traceback holds activations: they must go with the error, not when garbage is collected."""
    gc.disable()
    try:
        fallback, activations = Fallback(failing_with_activations), []
        try:
            fallback.rescue(fallback, failed("UNet", "a forward"))
        except ValueError as error:
            frames = error.__traceback__
            while frames.tb_next:
                frames = frames.tb_next
            activations.append(weakref.ref(frames.tb_frame.f_locals["activations"]))
            del frames
        assert activations[0]() is None
    finally:
        gc.enable()


def failing_with_activations():
    activations = torch.ones(4)
    raise ValueError(f"of {len(activations)}")


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("cuBLAS error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
    ids=str,
)
def test_guises_of_out_of_memory(error, short) -> None:
    assert is_out_of_memory(error) == short


# Wrong numbers ----------------------------------------------------------------------------------------------------


ROWS = torch.randn(8, 4, 96, 104, generator=torch.Generator().manual_seed(7))  # latents of a batch
OUTPUTS = {  # by the form of an output; the last dimensions are the space, but of tokens
    "latents": ROWS,
    "odd latents": ROWS[:1, :, :17, :13],
    "video": ROWS[:, :, None].repeat(1, 1, 3, 1, 1) + torch.arange(3.0)[:, None, None],
    "tokens": ROWS.flatten(2).transpose(1, 2)[:2],
    "image": torch.nn.functional.interpolate(ROWS[:2, :3], scale_factor=8),
    "features": ROWS[:1].repeat(1, 80, 1, 1) * torch.rand(320, 1, 1, generator=torch.Generator().manual_seed(8)),
    "pooled": ROWS.flatten(1),
    "scalar": ROWS[0, 0, 0, 0],
}


def noise(reference, share):
    """Of ``share`` of the norm, as rounding is spread: with what it rounds."""
    random = torch.randn(reference.shape, generator=torch.Generator().manual_seed(9))
    return reference + share * reference.float().norm() / reference.numel() ** 0.5 * random


@pytest.mark.parametrize("dtype", verify.BOUNDS, ids=str)
def test_what_is_equal_is_right(dtype) -> None:
    for reference in (*OUTPUTS.values(), torch.zeros(3), torch.zeros(0, 4, 8, 8)):
        assert verify.compare("it", reference.to(dtype), reference.to(dtype)) == verify.Comparison(True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", OUTPUTS)
def test_rounding_is_no_fault(dtype, form) -> None:
    """As much as correct programs show, in any form of output."""
    reference = OUTPUTS[form]
    assert verify.compare("it", noise(reference, verify.BOUNDS[dtype].whole / 3).to(dtype), reference.to(dtype))


def test_a_model_that_amplifies_rounding_has_bounds_of_its_own() -> None:
    """Three times what a step in its latent makes, at most a quarter of any part; never tighter than the others."""
    x = X.bfloat16()
    asked = {share: verify.Comparison(True, share, 1.4 * share) for share in (0.001, 0.03, 0.2)}
    for share, right, wrong in ((0.001, 0.03, 0.08), (0.03, 0.05, 0.14), (0.2, 0.12, 0.3)):
        assert verify.compare("it", noise(x, right).bfloat16(), x, asked[share])
        with pytest.raises(WrongResult):
            verify.compare("it", noise(x, wrong).bfloat16(), x, asked[share])


@pytest.mark.parametrize(
    "wrong", [X * 1.2, X + 1, -X, torch.zeros_like(X), X[:1], X.roll(1, -1), torch.where(X > 1, torch.nan, X)]
)
def test_other_numbers_are_a_fault(wrong) -> None:
    with pytest.raises(WrongResult):
        verify.compare("it", wrong, X)
    with pytest.raises(WrongResult):
        verify.compare("it", (X, wrong), (X, X))


def changed(reference, where, how):
    out = reference.clone()
    out[where] = how(out[where])
    return out


LOCAL = {
    "a black block of 16x16 latents": ("latents", (3, slice(None), slice(40, 56), slice(8, 24)), torch.zeros_like),
    "one tile": ("latents", (7, slice(None), slice(88, 96), slice(96, 104)), torch.zeros_like),
    "the edge's rest of a tile": ("odd latents", (0, slice(None), slice(None), slice(12, 13)), torch.zeros_like),
    "one scaled channel": ("latents", (5, 2), lambda channel: channel * 1.1),
    "one scaled channel of all rows": ("latents", (slice(None), 1), lambda channel: channel * 0.92),
    "a row of the batch, shifted": ("latents", (6,), lambda row: row.roll(1, -1)),
    "a row of pixels, shifted": ("image", (1, slice(None), 333), lambda row: row.roll(16, -1)),
    "one frame": ("video", (2, slice(None), 1), lambda frame: frame * 1.1),
    "a block of one frame": ("video", (2, slice(None), 1, slice(0, 16), slice(0, 16)), torch.zeros_like),
    "64 tokens": ("tokens", (1, slice(640, 704)), torch.zeros_like),
    "one channel of tokens": ("tokens", (1, slice(None), 3), lambda channel: channel * 1.1),
    "a block of pixels": ("image", (0, slice(None), slice(256, 384), slice(64, 192)), torch.zeros_like),
    "a block of features": ("features", (0, slice(None), slice(32, 40), slice(32, 40)), lambda block: block * 1.1),
    "one pooled row": ("pooled", (4,), lambda row: row * 1.1),
}


@pytest.mark.parametrize("fault", LOCAL)
def test_local_faults(fault) -> None:
    """Of one norm over all rows they are hardly anything; in bf16, whose bounds are the widest."""
    form, where, how = LOCAL[fault]
    reference = noise(OUTPUTS[form], 0.01).bfloat16()
    wrong = changed(reference, where, how)
    with pytest.raises(WrongResult, match="wrong result"):
        verify.compare("it", wrong, reference)
    with pytest.raises(WrongResult, match="wrong result"):
        verify.compare("it", (X, wrong), (X, reference))


def test_a_large_output_is_compared_in_pieces(monkeypatch) -> None:
    whole = verify.compare("it", noise(ROWS, 1e-3), ROWS)
    monkeypatch.setattr(verify, "PIECE", 1)
    assert verify.compare("it", noise(ROWS, 1e-3), ROWS).part == pytest.approx(whole.part)
    with pytest.raises(WrongResult):
        verify.compare("it", changed(ROWS, (7, slice(None), slice(0, 8)), torch.zeros_like), ROWS)


def test_the_device_is_waited_for_once(monkeypatch) -> None:
    waits, own = [], torch.Tensor.tolist
    for name in ("item", "__bool__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("another wait"))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: waits.append(self.shape) or own(self))
    assert verify.compare("it", (ROWS, ROWS[:2]), (ROWS, ROWS[:2]))
    assert waits == [(2, 4)]


def test_a_model_that_overflows_in_eager_says_nothing() -> None:
    overflown = changed(X, (0, 0, 0, 0), lambda _: torch.inf)
    found = verify.compare("it", X, overflown)
    assert not found and found == verify.NOTHING
    assert not verify.compare("it", (X, X * 2), (overflown, X))
    assert not verify.compare("it", overflown, overflown)
