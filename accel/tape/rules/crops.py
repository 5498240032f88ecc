"""Makes the crop at a tape's end one operation: models pad a picture to whole patches, and crop the result.

``x[:, :, :height, :width]`` is recorded as a slice for each side that really gets shorter, and as an alias if none
does. So sizes that need no padding, or need it along one side, would have different tapes, each with its own plan. The
same numbers: exact.
"""

from collections import Counter

from torch import Tensor

from ..layout import contiguous
from ..traits import ELEMENTWISE, aten
from ..values import Operation, Tape, Value
from . import edits

CROPS = frozenset(("alias", "slice"))
COMPUTED = ELEMENTWISE - {"copy", "fill"}
WHOLE = (None, 0, None, None, 1)  # the arguments of a slice that leaves out nothing


def merge(tape: Tape) -> str:
    """Applies to the model's results, where nobody reads the values in between. What is computed after a crop is
    computed before it. Exact.
    """
    chains = list(filter(None, map(_chain, dict.fromkeys(tape.outputs))))
    if not chains:
        return ""
    made = {operation.outputs[0] for chain in chains for operation in chain}
    reads = Counter(value for operation in tape.operations for value in operation.inputs if value in made)
    reads.update(tape.outputs)
    written = {operation.writes.root for operation in tape.operations if operation.writes is not None}
    instead: dict[int, list[Operation]] = {}
    for chain in chains:
        # of a computed result there may be no view: the memory that it shows would never be written
        alone = chain if any(map(_computes, chain)) else chain[:-1]
        if all(reads[each.outputs[0]] == 1 for each in alone) and chain[0].inputs[0].root not in written:
            instead |= {id(operation): [] for operation in chain} | {id(chain[-1]): _moved(chain)}
    tape.operations[:] = [new for operation in tape.operations for new in instead.get(id(operation), (operation,))]
    return ""


def crop(x: Tensor, *lengths: int) -> Tensor:
    """The first ``lengths`` of each dimension of ``x``, a view."""
    for dim, length in enumerate(lengths):
        x = x.narrow(dim, 0, length)
    return x


def cropped(x: Tensor, *lengths: int) -> Tensor:
    """As ``crop``, but a copy."""
    return crop(x, *lengths).clone()


crop.own = cropped.own = aten.slice.Tensor  # what they ask of torch, which ``program`` wants to know


def _chain(value: Value) -> list[Operation]:
    """The crops that end in ``value`` and what is computed between them, in order."""
    found: list[Operation] = []
    while (operation := value.origin) is not None and (_crops(operation) or _computes(operation)):
        found.insert(0, operation)
        value = operation.inputs[0]
    while found and not _crops(found[0]):
        del found[0]
    return found


def _crops(operation: Operation) -> bool:
    """Whether it keeps the first elements along a dimension, or all of them."""
    if operation.opaque or operation.writes is not None or operation.kwargs or operation.traits.name not in CROPS:
        return False
    _, _, start, _, step = (*operation.args, *WHOLE[len(operation.args) :])
    return operation.traits.name == "alias" or (not start and step == 1)


def _computes(operation: Operation) -> bool:
    """Whether it computes each number of its one tensor by itself."""
    if operation.opaque or operation.writes is not None or len(operation.inputs) != 1:
        return False
    known = operation.traits.name in COMPUTED
    return known and operation.outputs[0].base is None and operation.outputs[0].shape == operation.inputs[0].shape


def _moved(chain: list[Operation]) -> list[Operation]:
    """The same result, cropped at the very end."""
    out, whole = chain[-1].outputs[0], chain[0].inputs[0]
    computed = [operation for operation in chain if not _crops(operation)]
    for operation in computed:
        edits.replace_inputs(operation, {operation.inputs[0]: whole})
        made, shape = edits.made_of(operation), whole.shape
        stride = contiguous(shape) if made is None else made.stride()
        whole = Value.made(shape, stride, operation.outputs[0].dtype, out.device, number=out.number)
        whole.origin, operation.outputs = operation, [whole]
    func = crop if _crops(chain[-1]) else cropped
    out.origin = Operation(func, (whole, *out.shape), {}, [whole], [out], opaque=True)
    out.base = whole.root if func is crop else None
    return [*computed, out.origin]
