"""Errors that keep a fast path from running. Each carries the sentence that the user reads."""

import traceback

import torch


class AnyShapeError(RuntimeError):
    """Base of the errors that the engine turns into a slower tier; ``str(error)`` says what happened and what to do."""


class Unavailable(AnyShapeError):
    """Something cannot run here at all (no Triton, an old card), or a part of ours does not fit this ComfyUI."""


class KernelFailed(AnyShapeError):
    """A kernel could not be compiled or started here; its operation runs in plain torch."""


class CaptureFailed(AnyShapeError):
    """A CUDA graph could not be captured for one shape; the shape runs without a graph."""


class NoRoom(CaptureFailed):
    """There was no memory for the graph, or none of the budget; later there may be."""


class WrongResult(AnyShapeError):
    """A tier's numbers differ from eager's; the model runs without it."""


class ArtifactError(AnyShapeError):
    """A compiled artefact on disk cannot be used; it is compiled again."""


class Damaged(ArtifactError):
    """An artefact is not as it was written, so it is thrown away."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short. torch raises its own exception; the driver, cuBLAS and Triton only mention it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "alloc_failed" in text)


def memory_was_short(error: BaseException | None) -> bool:
    """Whether memory was, also where the error is what followed: it comes in several guises during a capture."""
    while error is not None and not is_out_of_memory(error):
        error = error.__cause__ or error.__context__
    return error is not None


def let_go(error: BaseException) -> None:
    """Lets go of what the code that raised ``error`` held: tensors, for which what runs instead may have no room."""
    left: BaseException | None = error
    while left is not None:
        traceback.clear_frames(left.__traceback__)
        left = left.__cause__ or left.__context__
