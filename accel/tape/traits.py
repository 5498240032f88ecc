"""What the recorder must know of an operation, read once from its schema.

Composite operations (``linear``, ``reshape``, ``layer_norm``) reach a dispatch mode as they are under inference mode,
which ComfyUI samples in. So a tape has the operations that a person would write.
"""

from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)

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
ADDING = frozenset("addmm addmv addr addbmm baddbmm".split())  # a product to ``beta`` times their first argument
# In place they write over what was there, all of it or a part, and do not read it.
OVERWRITES = frozenset(
    "copy_ fill_ zero_ index_put_ _index_put_impl_ index_copy_ index_fill_ scatter_ masked_scatter_".split()
)
UNWRITTEN = frozenset("empty empty_like empty_strided new_empty new_empty_strided empty_permuted".split())
# How many results there are, or how long they are, depends on values.
OF_VALUES = frozenset(
    "nonzero masked_select unique _unique _unique2 unique_dim unique_consecutive nonzero_numpy argwhere bincount "
    "combinations nested_tensor _nested_tensor_from_mask".split()
)
SOMETIMES_OF_VALUES = frozenset("index where repeat_interleave one_hot tensor_split".split())
DROPOUTS = frozenset(("dropout", "feature_dropout", "native_dropout", "dropout_", "feature_dropout_"))
ELEMENTWISE = frozenset(
    "add sub mul div rsub pow addcmul addcdiv where clamp clamp_min clamp_max maximum minimum lerp silu gelu sigmoid "
    "tanh neg exp rsqrt relu sqrt square sin cos abs reciprocal log softplus copy fill eq ne lt gt le ge".split()
)
NORMS = frozenset(("layer_norm", "rms_norm"))
ATTENTION = "scaled_dot_product_attention"  # chooses one of these
ATTENTIONS = tuple(
    f"_scaled_dot_product_{name}"
    for name in (
        "cudnn_attention", "flash_attention", "efficient_attention", "attention_math", "flash_attention_for_cpu",
        "fused_attention_overrideable",
    )
)  # fmt: skip
# A tensor full of one number, and which number.
FILLS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1} | dict.fromkeys(
    ("full", "full_like", "new_full"), "fill_value"
)
SYNONYMS = {"concat": "cat", "concatenate": "cat"}
MOVES = frozenset(("set_", "resize_", "resize_as_", "as_strided_", "swap_"))
# In place they keep the dtype of what they change; else they give another one.
TRUTHS = frozenset(
    "eq_ ne_ lt_ le_ gt_ ge_ less_ less_equal_ greater_ greater_equal_ not_equal_ logical_and_ logical_or_ "
    "logical_xor_ logical_not_".split()
)


def is_product(name: str) -> bool:
    """Whether an operation of this name multiplies rows with a weight, its first two arguments, whoever made it."""
    return ("linear" in name and "bilinear" not in name) or "_mm" in name or name.startswith("gemv_")


@dataclass(frozen=True, slots=True)
class Traits:
    """What matters of one operation."""

    name: str
    arguments: tuple[str, ...]
    writes: int  # the argument that an in-place operation changes, or -1
    written_name: str
    writes_several: bool
    moves: bool  # it changes where a tensor lies
    turns: Any  # for an operation in place that only makes a view of its tensor (``unsqueeze_``): the one that gives it
    random: bool
    may_draw: bool
    dropout: int  # of attention: the argument that says how much is dropped, or -1
    backends: bool  # it is torch's choice among several operations that do the same
    view: bool
    maybe_view: bool
    of_shapes: bool
    unwritten: bool
    of_values: bool
    may_size: bool
    fills: Any

    def written(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The argument that is written."""
        return args[self.writes] if self.writes < len(args) else kwargs.get(self.written_name)

    def sized_by_values(self, args: tuple, kwargs: dict[str, Any], inputs: list[Any]) -> bool:
        """Whether the size of this call's result depends on values."""
        if self.name == "index":
            return any(value.dtype in (torch.bool, torch.uint8) for value in inputs[1:])
        if self.name == "where":
            return len(args) == 1
        if self.name == "one_hot":
            return (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) < 0
        if self.name in ("repeat_interleave", "tensor_split"):
            counts = args[1] if len(args) > 1 else args[0]
            fixed = self.name == "repeat_interleave" and inputs[-1].is_constant  # how often: the same at each replay
            return isinstance(counts, torch.Tensor) and not fixed
        return self.of_values

    def with_size(self, args: tuple, kwargs: dict[str, Any], out: torch.Tensor) -> dict[str, Any]:
        """``kwargs``, with the size of ``out`` where a replay would wait for the device to find it out."""
        if self.name != "repeat_interleave" or len(args) < 2 or isinstance(args[1], int):
            return kwargs
        dim = args[2] if len(args) > 2 else kwargs.get("dim")
        return kwargs | {"output_size": out.numel() if dim is None else out.shape[dim]}

    def fill(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The number that the result is full of; None if it is not known."""
        if not isinstance(self.fills, str):
            return self.fills
        number = args[1] if len(args) > 1 and self.name != "new_full" else args[2] if len(args) > 2 else None
        number = kwargs.get(self.fills) if number is None else number
        return number if isinstance(number, (int, float)) and number == number else None


def read_by(known: Traits, kwargs: dict[str, Any], inputs: list[Any]) -> list[Any]:
    """Those of a call's ``inputs`` whose numbers it reads: a product to which nothing is added ignores its first."""
    return inputs[1:] if known.name in ADDING and kwargs.get("beta", 1) == 0 else inputs


def read_in_place(known: Traits, kwargs: dict[str, Any], target: Any, inputs: list[Any]) -> list[Any]:
    """As ``read_by``, of an operation that writes ``target``, an argument or its ``out``."""
    name = known.name
    ignored = name in OVERWRITES or known.turns is not None or (name[:-1] in ADDING and kwargs.get("beta", 1) == 0)
    return inputs if name.endswith("_") and not ignored else [value for value in inputs if value is not target]


def by_name(func: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an operation, without those that are left to their defaults."""
    return dict(zip(traits(func).arguments, args, strict=False)) | kwargs


_KNOWN: dict[Any, Traits] = {}


def traits(func: Any) -> Traits:
    """The traits of an operation (``torch._ops.OpOverload``)."""
    found = _KNOWN.get(func)
    if found is None:
        found = _KNOWN[func] = _read(func)
    return found


def _read(func: Any) -> Traits:
    schema = func._schema
    name = schema.name.split("::")[1]
    name = SYNONYMS.get(name, name)
    ours = schema.name.startswith(("aten::", "prim::"))
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    writes = written[0] if written and schema.is_mutable else -1
    aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    turned = getattr(aten, name[:-1], None) if ours and torch.Tag.inplace_view in func.tags else None
    turns = getattr(turned, func._overloadname, None) if name[:-1] in VIEWS else None
    random = torch.Tag.nondeterministic_seeded in func.tags
    dropout = -1
    if ours and name in ATTENTIONS:
        dropout = next(i for i, argument in enumerate(schema.arguments) if argument.name == "dropout_p")
    return Traits(
        name=name,
        arguments=tuple([argument.name for argument in schema.arguments]),
        writes=writes,
        written_name=schema.arguments[writes].name if writes >= 0 else "",
        writes_several=writes >= 0 and len(written) > 1,
        moves=name in MOVES or (writes >= 0 and torch.Tag.inplace_view in func.tags and turns is None),
        turns=turns,
        random=random,
        may_draw=random or name in DROPOUTS or dropout >= 0,
        dropout=dropout,
        backends=ours and name == ATTENTION,
        view=ours and name in VIEWS,
        maybe_view=name not in VIEWS and (name in MAYBE_VIEWS or aliases),
        of_shapes=ours and name in OF_SHAPES,
        unwritten=ours and name in UNWRITTEN,
        of_values=ours and name in OF_VALUES,
        may_size=ours and (name in OF_VALUES or name in SOMETIMES_OF_VALUES),
        fills=FILLS.get(name) if ours else None,
    )


def draws(known: Traits, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether this call draws random numbers. Attention and dropout are marked so whatever their probability is."""
    if known.dropout >= 0:
        return (args[known.dropout] if len(args) > known.dropout else kwargs.get("dropout_p", 0.0)) > 0
    if known.name in DROPOUTS:
        return bool(args[2] if len(args) > 2 else kwargs.get("train")) and args[1] > 0
    return known.random
