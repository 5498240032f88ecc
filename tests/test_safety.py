"""What keeps a fault of ours from costing an image: one place for failures, and a look at each shape's first result."""

import gc
import weakref

import pytest
import torch

from tools import embed
from tools.oracles import fallbacks

embed.bare_pack()

from anyshape.accel import stats, verify  # noqa: E402 - the package exists from the line above on
from anyshape.accel.attempt import Theirs, attempt, failed  # noqa: E402
from anyshape.accel.engine import Call, Engine, Settings  # noqa: E402
from anyshape.accel.errors import WrongResult, is_out_of_memory  # noqa: E402
from anyshape.accel.key import shape_key  # noqa: E402

X = torch.randn(2, 4, 8, 8)
pytestmark = pytest.mark.usefixtures("own_stats")


class Interrupt(Exception):
    """Stands for the user's."""


@pytest.fixture
def own_stats(monkeypatch):
    """Counters of the test's own."""
    own = stats.Stats()
    for module in ("stats", "engine", "attempt"):
        monkeypatch.setattr(f"anyshape.accel.{module}.STATS", own)
    return own


@pytest.fixture
def engine(own_stats):
    return Engine(own_stats.model("Engine", "model"), passthrough=(Interrupt,))


def call(forward, eager=lambda: X * 2, x=X, **changes):
    inputs = {"x": x}
    return Call(shape_key(inputs), inputs, forward, eager, weights=0, width=64, height=64, batch=2, **changes)


def state(engine):
    (shape,) = engine.stats.shapes.values()
    return shape.state, shape.reason


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
    theirs = Theirs(lambda: "image")
    assert theirs.rescue(failing(ValueError("bug")), failed("UNet", "a forward")) == "image"
    (fallback,) = fallbacks()
    assert fallback["where"] == "UNet" and "ValueError: bug" in fallback["reason"] and fallback["count"] == 1


def test_a_fault_of_theirs_is_the_users_to_see() -> None:
    theirs = Theirs(failing(ValueError("their own")))
    with pytest.raises(ValueError, match="their own"):
        theirs.rescue(theirs, failed("UNet", "a forward"))
    assert not fallbacks() and theirs.error is None


def test_a_fault_of_theirs_leaves_no_cycle() -> None:
    """Its traceback holds activations: they must go with the error, not when garbage is collected."""
    gc.disable()
    try:
        theirs, activations = Theirs(failing_with_activations), []
        try:
            theirs.rescue(theirs, failed("UNet", "a forward"))
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


@pytest.mark.parametrize("dtype", verify.TOLERANCE)
def test_rounding_is_no_fault(dtype) -> None:
    reference = X.to(dtype)
    verify.compare("it", reference * (1 + verify.TOLERANCE[dtype] / 2), reference)
    verify.compare("it", torch.zeros(3), torch.zeros(3))


@pytest.mark.parametrize(
    "wrong", [X * 1.2, X + 1, -X, torch.zeros_like(X), X[:1], X.roll(1, -1), torch.where(X > 1, torch.nan, X)]
)
def test_other_numbers_are_a_fault(wrong) -> None:
    with pytest.raises(WrongResult):
        verify.compare("it", wrong, X)
    with pytest.raises(WrongResult):
        verify.compare("it", (X, wrong), (X, X))


def test_a_model_that_overflows_in_eager_says_nothing() -> None:
    verify.compare("it", X, torch.full_like(X, torch.inf))


def test_a_tier_that_is_wrong_is_retired(engine) -> None:
    """From its first call on the image is eager's; the reason is where users look."""
    tried = []

    def wrong(ops, inputs):
        tried.append(ops.name)
        return inputs["x"] * 3

    for _ in range(3):
        assert torch.equal(engine(call(wrong), Settings()), X * 2)
    assert tried == ["regions"]
    assert state(engine)[0] == "eager" and "wrong result" in state(engine)[1] and "64x64" in state(engine)[1]
    assert any("wrong result" in fallback["reason"] for fallback in fallbacks())


def test_a_tier_whose_numbers_are_not_finite_is_retired(engine) -> None:
    assert torch.equal(engine(call(lambda ops, inputs: inputs["x"] / 0), Settings()), X * 2)
    assert "not finite" in state(engine)[1]


def test_each_shape_is_compared_once(engine) -> None:
    eager_calls = []

    def eager(x):
        eager_calls.append(x.shape)
        return x * 2

    for x in (X, X, X[:1], X, X[..., :5], X[:1]):
        out = engine(call(lambda ops, inputs: inputs["x"] * 2, eager=lambda x=x: eager(x), x=x), Settings())
        assert torch.equal(out, x * 2)
    assert eager_calls == [X.shape, X[:1].shape, X[..., :5].shape]


def test_it_can_be_switched_off(engine) -> None:
    out = engine(call(lambda ops, inputs: inputs["x"] * 2, eager=failing(AssertionError())), Settings(verify=False))
    assert torch.equal(out, X * 2) and state(engine) == ("tape", "")


def test_code_of_other_packs_does_not_run_twice(engine) -> None:
    """A patch may count its calls, so its forward is not repeated; a black image is seen all the same."""
    out = engine(call(lambda ops, i: i["x"] * 2, eager=failing(AssertionError()), repeatable=False), Settings())
    assert torch.equal(out, X * 2)
    black = call(lambda ops, inputs: inputs["x"] * torch.nan, repeatable=False)
    engine._verified.clear()
    assert torch.equal(engine(black, Settings()), X * 2)


def test_eager_may_need_more_memory_than_there_is(engine) -> None:
    short = call(lambda ops, inputs: inputs["x"] * 2, eager=failing(torch.OutOfMemoryError("short")))
    assert torch.equal(engine(short, Settings()), X * 2)
    assert state(engine) == ("tape", "") and not fallbacks()
