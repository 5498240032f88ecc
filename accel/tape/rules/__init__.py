"""Rules: each rewrites a tape, and says in a sentence why that is exact, or how far it is not.

A rule is about an idiom, never about a model. It gets the tape and returns the sentence of what it did to the rounding,
or "" where results stay as eager's.
"""

from collections.abc import Callable

from ...preparing import look
from ..values import Tape
from . import (
    attention,
    attention_kernel,
    by_tokens,
    chained_joins,
    channels_last,
    conv_bias,
    copies,
    crops,
    edits,
    epilogue,
    geglu,
    int8,
    kitchen,
    linear_groups,
    norm_neighbours,
    once,
    pads,
    parts,
    resident,
    roundings,
    shared_heads,
    slices,
    upsample,
)  # fmt: skip

Rule = Callable[[Tape], str]

RULES: tuple[Rule, ...] = (
    kitchen.decompose, slices.to_values, chained_joins.join_once, parts.put_together, int8.round_once,
    copies.drop_repeats, copies.attend_in_place, resident.keep, once.compute_once, roundings.round_first, pads.fold,
    channels_last.lay_out, upsample.double, conv_bias.add_after, norm_neighbours.take_in, geglu.join_product,
    attention_kernel.attend, linear_groups.join, epilogue.fuse_gelu, attention.take_fastest, shared_heads.share,
    by_tokens.store_by_tokens, crops.merge,
)  # fmt: skip


def apply(tape: Tape) -> list[str]:
    """Applies every rule; the sentences of those that are less exact than eager."""
    sentences = []
    for rule in RULES:
        look()
        sentences.append(rule(tape))
    edits.settle(tape)
    return [sentence for sentence in sentences if sentence]
