"""What a forward gives: a tensor, or several (a ControlNet's residuals, a full step with its deep feature)."""

from collections.abc import Callable

from torch import Tensor

Output = Tensor | tuple[Tensor, ...]


def tensors_of(output: Output) -> tuple[Tensor, ...]:
    """The tensors of ``output``, one or several."""
    return (output,) if isinstance(output, Tensor) else output


def each(fn: Callable[..., Tensor], *outputs: Output) -> Output:
    """``fn`` of the outputs, tensor by tensor, in the form of the first one."""
    if isinstance(outputs[0], Tensor):
        return fn(*outputs)
    return tuple(fn(*tensors) for tensors in zip(*outputs, strict=True))
