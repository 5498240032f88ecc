"""What can keep a fast path from running. Each error carries the sentence that the user reads."""


class AnyShapeError(RuntimeError):
    """Base of the errors that the engine turns into a slower tier; ``str(error)`` says what happened and what to do."""


class Unavailable(AnyShapeError):
    """A tier cannot run here at all (no Triton, no compiler, an old card)."""


class KernelFailed(AnyShapeError):
    """A kernel could not be compiled or started here; its operation runs in plain torch."""


class CaptureFailed(AnyShapeError):
    """A CUDA graph could not be captured for one shape; the shape runs without a graph."""
