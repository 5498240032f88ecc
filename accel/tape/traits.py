"""What the recorder must know of an operation, read once from its schema.

Composite operations (``linear``, ``reshape``, ``layer_norm``) reach a dispatch mode as they are under inference mode,
which ComfyUI samples in. So a tape has the operations that a person would write.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten

# Always a view of the first argument, by name of the operation.
VIEWS = frozenset(
    "view transpose permute unsqueeze squeeze select slice expand chunk unbind split split_with_sizes narrow movedim "
    "_unsafe_view alias detach t unflatten view_as swapaxes swapdims expand_as tensor_split unsafe_chunk unsafe_split "
    "numpy_T mT diagonal unfold real view_as_real view_as_complex".split()
)
# The first argument itself, a view of it, or a copy, whichever torch finds right.
MAYBE_VIEWS = frozenset("reshape contiguous to flatten type_as float _to_copy reshape_as ravel dropout".split())
# Their results depend on the shapes of their arguments alone.
OF_SHAPES = frozenset(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty new_empty_strided".split()
)
UNWRITTEN = frozenset("empty empty_like empty_strided new_empty new_empty_strided empty_permuted".split())
# How many results there are, or how long they are, depends on values.
OF_VALUES = frozenset("nonzero masked_select unique _unique _unique2 unique_consecutive nonzero_numpy argwhere".split())


@dataclass(frozen=True)
class Traits:
    """What matters of one operation."""

    name: str
    writes: int  # the argument that an in-place operation changes, or -1
    random: bool
    view: bool
    maybe_view: bool
    of_shapes: bool
    unwritten: bool
    of_values: bool


@functools.cache
def traits(func: Any) -> Traits:
    """The traits of an operation (``torch._ops.OpOverload``)."""
    schema = func._schema
    name = schema.name.split("::")[1]
    ours = schema.name.startswith(("aten::", "prim::"))
    writes = next((i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write), -1)
    aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return Traits(
        name=name,
        writes=writes if schema.is_mutable else -1,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        view=ours and name in VIEWS,
        maybe_view=name not in VIEWS and (name in MAYBE_VIEWS or aliases),
        of_shapes=ours and name in OF_SHAPES,
        unwritten=ours and name in UNWRITTEN,
        of_values=ours and name in OF_VALUES,
    )


def is_random(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether this call draws random numbers. Attention and dropout are marked so whatever their probability is."""
    name = traits(func).name
    if name == "scaled_dot_product_attention":
        return (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0
    if name in ("dropout", "feature_dropout", "native_dropout"):
        return bool(args[2] if len(args) > 2 else kwargs.get("train")) and args[1] > 0
    return traits(func).random
