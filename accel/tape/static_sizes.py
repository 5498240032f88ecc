"""Which sizes of each value belong to the model and which to the call.

A weight's sizes belong to the model, an input's to the call, but for its channels (``channels``). From there they
follow the operations: a linear layer's result has its weight's channels and its input's tokens. What no rule knows
belongs to the call, which is always right.
"""

from collections.abc import Callable

from . import channels, views
from .traits import ATTENTIONS, ELEMENTWISE, is_product
from .values import ONE, Constant, Derived, Input, Operation, Size, Sizes, Spread, Tape, Value, Weight

CONVOLUTIONS = frozenset("conv1d conv2d conv3d convolution cudnn_convolution conv2d_last conv3d_last".split())
SMALL = 4  # the last sizes of a constant up to this are of the model: the 2x2 of a rotary table, not a batch


def annotate(tape: Tape) -> None:
    """Sets ``sizes`` of every value on the tape."""
    for value in tape.inputs:
        value.sizes = of_leaf(value)
    readers = channels.readers(tape)
    channels.mark(channels.of_layers(readers))
    _follow(tape)
    if channels.mark(channels.met(readers)):
        _follow(tape)


def _follow(tape: Tape) -> None:
    """From the leaves on."""
    weights: dict[tuple[int, ...], Sizes] = {}  # by shape: of the model, so they may as well be the same
    for operation in tape.operations:
        for value in operation.inputs:
            if value.leaf is not None and not value.sizes:
                if type(value.leaf) is Weight:
                    value.sizes = weights.get(value.shape) or weights.setdefault(value.shape, of_leaf(value))
                else:
                    value.sizes = of_leaf(value)
        operation.alike = operation.like is not None and _is_alike(operation, operation.like)
        if operation.alike:
            operation.runs = operation.like.runs
            for output, known in zip(operation.outputs, operation.like.outputs, strict=True):
                if output is not None:
                    output.sizes = known.sizes
            continue
        for output in operation.outputs:
            if output is not None:
                output.sizes = _of(operation, output)


def _is_alike(operation: Operation, like: Operation) -> bool:
    """Whether the same has been asked before, of values with the same sizes."""
    if operation.func is not like.func or operation.writes is not None or len(operation.inputs) != len(like.inputs):
        return False
    if any(own.sizes != theirs.sizes for own, theirs in zip(operation.inputs, like.inputs, strict=True)):
        return False
    pairs = zip(operation.outputs, like.outputs, strict=True)
    return all(known.sizes and own.shape == known.shape for own, known in pairs if own is not None)


def of_leaf(value: Value) -> Sizes:
    """The sizes of a leaf."""
    if isinstance(value.leaf, (Weight, Derived, Spread)):
        return tuple(ONE if n == 1 else Size(n, static=True) for n in value.shape)
    if isinstance(value.leaf, Input):
        if value.turns:  # a matrix for each pair of a head's channels
            return tuple(ONE if n == 1 else Size(n, static=place > 2) for place, n in enumerate(value.shape))
        return tuple(Size(n) for n in value.shape)
    assert isinstance(value.leaf, Constant)
    large = max((place for place, n in enumerate(value.shape) if n > SMALL), default=-1)
    large = max(large, 0)  # the first may be a batch
    return tuple(ONE if n == 1 and place > large else Size(n, place > large) for place, n in enumerate(value.shape))


def _of(operation: Operation, output: Value) -> Sizes:
    if operation.writes is not None and operation.writes.shape == output.shape:
        return operation.writes.sizes
    if operation.opaque:
        rule = getattr(operation.func, "sizes", None)  # of an operation that a rule put there
    else:
        name = operation.traits.name
        rule = _RULES.get(name) or _of_quantised(name)
    found = rule(operation, output) if rule is not None and operation.inputs else None
    if found is None or tuple([size.value for size in found]) != output.shape:
        return tuple(Size(n) for n in output.shape)
    return found


def _same(operation: Operation, output: Value) -> Sizes:
    return operation.inputs[0].sizes


def _reshape(operation: Operation, output: Value) -> Sizes:
    return views.reshaped(operation)


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
    if operation.traits.name == "squeeze" and len(operation.args) < 2:
        return None
    dim = views.dimension(operation, 1, len(source.shape))
    return source.sizes[:dim] + source.sizes[dim + 1 :]


def _part(operation: Operation, output: Value) -> Sizes:
    """slice, narrow, chunk, split: one dimension gets shorter. What is cut from a weight is as long as the call."""
    source = operation.inputs[0]
    table = views.is_table(source)
    return tuple(
        size if size.value == n else _piece(operation, size, n) or Size(n, size.static and not table)
        for size, n in zip(source.sizes, output.shape, strict=True)
    )


def _piece(operation: Operation, size: Size, length: int) -> Size | None:
    """One of the sizes that were joined to ``size``, if a slice takes just that."""
    if not size.joined or operation.traits.name not in ("slice", "narrow"):
        return None
    start = views.start(operation, operation.outputs[0])
    pieces = list(size.joined)
    while pieces:
        piece = pieces.pop(0)
        if start == 0 and piece.value == length:
            return piece
        if start < piece.value:
            pieces[:0] = piece.joined
            if not piece.joined:
                return None
        else:
            start -= piece.value
    return None


def _expand(operation: Operation, output: Value) -> Sizes:
    sizes = operation.inputs[0].sizes
    new = len(output.shape) - len(sizes)
    kept = [s if s.value == n and s is not ONE else Size(n) for s, n in zip(sizes, output.shape[new:], strict=True)]
    return tuple([Size(n) for n in output.shape[:new]] + kept)


def broadcast(inputs: list[Value], rank: int, apart: int = -1) -> Sizes:
    """The sizes of an element-wise result: of those that are no 1, one that belongs to the model counts first.

    apart: a dimension whose sizes have nothing to do with each other.
    """
    parts = [value.sizes for value in inputs if value.sizes]
    if len(parts) == 1 and len(parts[0]) == rank:
        return parts[0]
    result: list[Size] = []
    for d in range(rank):
        found = [sizes[d - rank] for sizes in parts if len(sizes) >= rank - d]
        longest = max((size.value for size in found), default=1)
        fitting = [size for size in found if size.value == longest]
        static = next((size for size in fitting if size.static and size is not ONE), None)
        loose = [size for size in fitting if not size.static]
        for size in loose[1:] if d != apart else ():
            loose[0].meet(size)
        if static and loose and d < rank - 1:
            here = [value for value in inputs if len(value.shape) >= rank - d]
            if any(map(views.is_table, here)):  # of positions, all of it by chance
                static = None
        result.append(static or (loose[0] if loose else ONE))
    return tuple(result)


def _pointwise(operation: Operation, output: Value) -> Sizes:
    return broadcast(operation.inputs, len(output.shape))


def linear(operation: Operation, output: Value) -> Sizes:
    x, weight = operation.args[:2]
    return (*x.sizes[:-1], weight.sizes[0])


def _geglu(operation: Operation, output: Value) -> Sizes:
    return (*operation.args[0].sizes[:-1], Size(output.shape[-1], operation.args[1].sizes[0].static))


def _side_by_side(operation: Operation, output: Value) -> Sizes:
    """Many linear layers of one input, or of one each."""
    weight = operation.args[1][views.pieces(operation, output)]
    return (*operation.args[0][0].sizes[:-1], weight.sizes[0])


def quantised_product(operation: Operation, output: Value) -> Sizes:
    """A product with a quantised weight, which lies in a form of its own; rows may have been filled up.

    The weight may be several tensors.
    """
    x, weight = operation.args[:2]
    parts = weight if isinstance(weight, tuple) else (weight,)
    rows = x.sizes[:-1]
    if [size.value for size in rows] != list(output.shape[:-1]):
        rows = tuple(Size(n) for n in output.shape[:-1])
    return (*rows, Size(output.shape[-1], all(size.static for part in parts for size in part.sizes)))


def quantised(operation: Operation, output: Value) -> Sizes | None:
    """Numbers in another form, or what they stand for: of a weight it belongs to the model."""
    source = operation.inputs[0]
    if source.shape == output.shape:
        return source.sizes
    if output.shape == (*source.shape[:-1], 1):  # a scale for each row
        return (*source.sizes[:-1], ONE)
    if all(size.static for value in operation.inputs for size in value.sizes):
        return tuple(ONE if n == 1 else Size(n, static=True) for n in output.shape)
    return None


def _of_quantised(name: str) -> "Rule | None":
    """By what the name of a library's operation says, so that one of a newer version is known too."""
    if is_product(name):
        return quantised_product
    return quantised if name.startswith(("quantize_", "dequantize_")) else None


def _outer(operation: Operation, output: Value) -> Sizes:
    a, b = operation.args[:2]
    return a.sizes[0], b.sizes[0]


def _matmul(operation: Operation, output: Value) -> Sizes | None:
    a, b = operation.args[-2:] if operation.traits.name in ("addmm", "baddbmm") else operation.args[:2]
    if len(a.shape) < 2 or len(b.shape) < 2 or len(a.shape) < len(b.shape):
        return None
    return (*a.sizes[:-1], b.sizes[-1])


def attention(operation: Operation, output: Value) -> Sizes:
    """Of queries, keys and values: the queries' sizes, with the values' channels."""
    return (*operation.args[0].sizes[:-1], operation.args[2].sizes[-1])


def _convolution(operation: Operation, output: Value) -> Sizes:
    x, weight = operation.args[:2]
    return (x.sizes[0], weight.sizes[0], *(Size(n) for n in output.shape[2:]))


def _resampled(operation: Operation, output: Value) -> Sizes | None:
    """Pictures or videos of other sides, and of as many channels."""
    x = operation.inputs[0]
    return (*x.sizes[:2], *(Size(n) for n in output.shape[2:])) if len(x.shape) == len(output.shape) else None


def _shuffled(operation: Operation, output: Value) -> Sizes:
    return (*operation.inputs[0].sizes[:-3], *(Size(n) for n in output.shape[-3:]))


def _padded(operation: Operation, output: Value) -> Sizes:
    kept = len(output.shape) - len(operation.args[1]) // 2
    return (*operation.inputs[0].sizes[:kept], *(Size(n) for n in output.shape[kept:]))


def _joined(operation: Operation, output: Value) -> Sizes:
    parts = operation.args[0]
    dim = views.dimension(operation, 1, len(output.shape))
    sizes = list(broadcast(parts, len(output.shape), dim))
    lengths = tuple(part.sizes[dim] for part in parts)
    sizes[dim] = Size(output.shape[dim], all(size.static for size in lengths), joined=lengths)
    return tuple(sizes)


def _stacked(operation: Operation, output: Value) -> Sizes:
    sizes = list(broadcast(operation.args[0], len(output.shape) - 1))
    dim = views.dimension(operation, 1, len(output.shape))
    sizes.insert(dim, Size(output.shape[dim], static=dim > 0))  # along the first as many as pictures
    return tuple(sizes)


def _reduced(operation: Operation, output: Value) -> Sizes | None:
    source, rank = operation.inputs[0], len(operation.inputs[0].shape)
    place = 2 if "norm" in operation.traits.name else 1  # behind which norm it is
    given = operation.args[place] if len(operation.args) > place else operation.kwargs.get("dim")
    dims = {d % rank for d in ((given,) if isinstance(given, int) else given or range(rank))}
    if len(output.shape) == rank:
        return tuple(ONE if d in dims else size for d, size in enumerate(source.sizes))
    return tuple(size for d, size in enumerate(source.sizes) if d not in dims)


def _repeated(operation: Operation, output: Value) -> Sizes | None:
    source = operation.inputs[0]
    if len(source.shape) != len(output.shape):
        return None
    if len(operation.inputs) > 1:  # each row so often as a tensor says, which knows the sizes of the call
        dim = (operation.args[2] if len(operation.args) > 2 else operation.kwargs.get("dim")) or 0
        dim %= len(output.shape)
        return (*source.sizes[:dim], Size(output.shape[dim]), *source.sizes[dim + 1 :])
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
        ("linear_geglu", _geglu),
        ("grouped_linear", _side_by_side),
        ("matmul mm bmm", _matmul),
        (" ".join(ATTENTIONS), attention),
        ("outer ger", _outer),
        (" ".join(CONVOLUTIONS), _convolution),
        ("cat concat concatenate", _joined),
        ("stack", _stacked),
        ("mean sum amax var norm linalg_vector_norm", _reduced),
        ("repeat repeat_interleave", _repeated),
        ("pixel_shuffle pixel_unshuffle", _shuffled),
        ("pad constant_pad_nd pad_last", _padded),
        (
            "avg_pool2d avg_pool3d max_pool2d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
            "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact2d upsample_last",
            _resampled,
        ),
        (
            "layer_norm rms_norm softmax _softmax group_norm copy_ fill_ zero_ cumsum flip roll native_layer_norm "
            "group_norm_last flash_attention " + " ".join(views.SAME),
            _same,
        ),
        (" ".join(views.RESHAPES), _reshape),
        (" ".join(ELEMENTWISE), _pointwise),
    ):
        rules |= dict.fromkeys(names.split(), rule)
    return rules


_RULES = _table()
