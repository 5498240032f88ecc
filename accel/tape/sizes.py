"""Which sizes of each value belong to the model and which to the call.

A weight's sizes belong to the model, an input's to the call. From there they follow the operations: a linear layer's
result has its weight's channels and its input's tokens. What no rule knows belongs to the call, which is always right.
"""

from collections.abc import Callable

from . import views
from .traits import ATTENTIONS, traits
from .values import ONE, Constant, Input, Operation, Size, Sizes, Tape, Value, Weight

SMALL = 4  # the last sizes of a constant up to this are of the model: the 2x2 of a rotary table, not a batch


def annotate(tape: Tape) -> None:
    """Sets ``sizes`` of every value on the tape."""
    for value in tape.inputs:
        value.sizes = of_leaf(value)
    for operation in tape.operations:
        for value in operation.inputs:
            if value.leaf is not None and not value.sizes:
                value.sizes = of_leaf(value)
        for output in operation.outputs:
            if output is not None:
                output.sizes = _of(operation, output)


def of_leaf(value: Value) -> Sizes:
    """The sizes of a leaf."""
    if isinstance(value.leaf, Weight):
        return tuple(ONE if n == 1 else Size(n, static=True) for n in value.shape)
    if isinstance(value.leaf, Input):
        return tuple(Size(n) for n in value.shape)
    assert isinstance(value.leaf, Constant)
    large = max((place for place, n in enumerate(value.shape) if n > SMALL), default=-1)
    large = max(large, 0)  # the first may be a batch
    return tuple(ONE if n == 1 and place > large else Size(n, place > large) for place, n in enumerate(value.shape))


def _of(operation: Operation, output: Value) -> Sizes:
    if operation.opaque:
        rule = getattr(operation.func, "sizes", None)  # of an operation that a rule put there
    else:
        rule = _RULES.get(traits(operation.func).name)
    found = rule(operation, output) if rule is not None and operation.inputs else None
    if found is None or tuple([size.value for size in found]) != output.shape:
        return tuple(Size(n) for n in output.shape)
    return found


def _same(operation: Operation, output: Value) -> Sizes:
    return operation.inputs[0].sizes


def _reshape(operation: Operation, output: Value) -> Sizes:
    source = operation.inputs[0]
    return views.reshaped(output.shape, source.shape, source.sizes)


def _permute(operation: Operation, output: Value) -> Sizes | None:
    source = operation.inputs[0]
    order = views.permutation(operation, len(source.shape))
    return order and tuple(source.sizes[d] for d in order)


def _unsqueeze(operation: Operation, output: Value) -> Sizes:
    sizes = list(operation.inputs[0].sizes)
    sizes.insert(operation.args[1] % len(output.shape), ONE)
    return tuple(sizes)


def _remove(operation: Operation, output: Value) -> Sizes | None:
    """squeeze, select, unbind: one dimension goes."""
    source = operation.inputs[0]
    if len(output.shape) == len(source.shape):
        return source.sizes
    if traits(operation.func).name == "squeeze" and len(operation.args) < 2:
        return None
    dim = views.dimension(operation, 1, len(source.shape))
    return source.sizes[:dim] + source.sizes[dim + 1 :]


def _part(operation: Operation, output: Value) -> Sizes:
    """slice, narrow, chunk, split: one dimension gets shorter. What is cut from a weight is as long as the call."""
    source = operation.inputs[0]
    table = views.is_table(source)
    return tuple(
        size if size.value == n else Size(n, size.static and not table)
        for size, n in zip(source.sizes, output.shape, strict=True)
    )


def _expand(operation: Operation, output: Value) -> Sizes:
    sizes = operation.inputs[0].sizes
    new = len(output.shape) - len(sizes)
    kept = [Size(n) if s is ONE else s for s, n in zip(sizes, output.shape[new:], strict=True)]
    return tuple([Size(n) for n in output.shape[:new]] + kept)


def broadcast(inputs: list[Value], rank: int) -> Sizes:
    """The sizes of an element-wise result: of those that are no 1, one that belongs to the model counts first."""
    parts = [value.sizes for value in inputs if value.sizes]
    if len(parts) == 1 and len(parts[0]) == rank:
        return parts[0]
    result: list[Size] = []
    for d in range(-rank, 0):
        found = [sizes[d] for sizes in parts if len(sizes) >= -d]
        longest = max((size.value for size in found), default=1)
        fitting = [size for size in found if size.value == longest]
        static = next((size for size in fitting if size.static and size is not ONE), None)
        loose = next((size for size in fitting if not size.static), None)
        result.append(static or loose or ONE)
    return tuple(result)


def _pointwise(operation: Operation, output: Value) -> Sizes:
    return broadcast(operation.inputs, len(output.shape))


def linear(operation: Operation, output: Value) -> Sizes:
    x, weight = operation.args[:2]
    return (*x.sizes[:-1], weight.sizes[0])


def _matmul(operation: Operation, output: Value) -> Sizes | None:
    a, b = operation.args[-2:] if traits(operation.func).name in ("addmm", "baddbmm") else operation.args[:2]
    if len(a.shape) < 2 or len(b.shape) < 2 or len(a.shape) < len(b.shape):
        return None
    return (*a.sizes[:-1], b.sizes[-1])


def attention(operation: Operation, output: Value) -> Sizes:
    """Of queries, keys and values: the queries' sizes, with the values' channels."""
    return (*operation.args[0].sizes[:-1], operation.args[2].sizes[-1])


def _convolution(operation: Operation, output: Value) -> Sizes:
    x, weight = operation.args[:2]
    return (x.sizes[0], weight.sizes[0], *(Size(n) for n in output.shape[2:]))


def _joined(operation: Operation, output: Value) -> Sizes:
    parts = operation.args[0]
    dim = views.dimension(operation, 1, len(output.shape))
    sizes = list(broadcast(parts, len(output.shape)))
    sizes[dim] = Size(output.shape[dim], all(part.sizes[dim].static for part in parts))
    return tuple(sizes)


def _stacked(operation: Operation, output: Value) -> Sizes:
    sizes = list(broadcast(operation.args[0], len(output.shape) - 1))
    sizes.insert(views.dimension(operation, 1, len(output.shape)), Size(output.shape[-1], static=True))
    return tuple(size if size.value == n else Size(n, static=True) for size, n in zip(sizes, output.shape, strict=True))


def _reduced(operation: Operation, output: Value) -> Sizes | None:
    source = operation.inputs[0]
    if len(source.shape) != len(output.shape):
        return None
    return tuple(s if s.value == n else ONE for s, n in zip(source.sizes, output.shape, strict=True))


def _repeated(operation: Operation, output: Value) -> Sizes | None:
    source = operation.inputs[0]
    if len(source.shape) != len(output.shape):
        return None
    return tuple(
        Size(n) if s is ONE else s if s.value == n else Size(n, s.static)
        for s, n in zip(source.sizes, output.shape, strict=True)
    )


Rule = Callable[[Operation, Value], "Sizes | None"]


def _table() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for names, rule in (
        ("transpose swapaxes swapdims t numpy_T mT permute movedim", _permute),
        ("squeeze select unbind", _remove),
        ("slice narrow chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split", _part),
        ("expand expand_as", _expand),
        ("unsqueeze", _unsqueeze),
        ("linear", linear),
        ("matmul mm bmm", _matmul),
        (" ".join(ATTENTIONS), attention),
        ("conv1d conv2d conv3d convolution", _convolution),
        ("cat concat concatenate", _joined),
        ("stack", _stacked),
        ("mean sum amax var", _reduced),
        ("repeat repeat_interleave", _repeated),
        (
            "layer_norm rms_norm softmax _softmax group_norm copy_ fill_ zero_ cumsum flip roll native_layer_norm "
            + " ".join(views.SAME),
            _same,
        ),
        (" ".join(views.RESHAPES), _reshape),
        (
            "add sub mul div rsub pow addcmul addcdiv where clamp clamp_min clamp_max maximum minimum lerp silu gelu "
            "sigmoid tanh neg exp rsqrt relu sqrt square sin cos abs reciprocal log softplus copy fill "
            "eq ne lt gt le ge",
            _pointwise,
        ),
    ):
        rules |= dict.fromkeys(names.split(), rule)
    return rules


_RULES = _table()
