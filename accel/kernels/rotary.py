"""RMSNorm and rotary embedding of query and key, written where attention wants them; see ``reference``.

Reads the projection [B, T, 3 * H * D] of a token stream and writes [B, T, H, D], from which flash attention makes an
output that needs no copy. Several streams (text and image) are written behind one another, so nothing is concatenated.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .rows import as_rows

HEADS = 8  # a program


@triton.jit
def _normalise_and_rotate(x, scale, ee, oe, eo, oo, D, eps, BH: tl.constexpr, BD: tl.constexpr):
    """RMSNorm of each row of x [BH, BD], then each pair times its matrix.

    ee, oe [BD / 2]: what the even channel takes of the even and of the odd one; eo, oo: what the odd one takes.
    """
    x *= (1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps))[:, None] * scale[None, :]
    even, odd = tl.split(tl.reshape(x, (BH, BD // 2, 2)))
    rotated = tl.join(even * ee[None, :] + odd * oe[None, :], even * eo[None, :] + odd * oo[None, :])
    return tl.reshape(rotated, (BH, BD))


@triton.jit(do_not_specialize=["T", "TOTAL", "START", "QKV_ROWS", "ROTATION_ROWS"])
def rotary_kernel(
    qkv, rotation, query_scale, key_scale, q, k, v, T, TOTAL, START, QKV_ROWS, ROTATION_ROWS, QKV_STRIDE, H, D, eps,
    HAS_VALUE: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """BH heads of one token a program; its row in q, k and v is START tokens further than in qkv."""
    image, token = (tl.program_id(0) // T).to(tl.int64), tl.program_id(0) % T
    h, d = tl.program_id(1) * BH + tl.arange(0, BH), tl.arange(0, BD)
    in_d, mask = d < D, (h[:, None] < H) & (d[None, :] < D)
    within = h[:, None] * D + d[None, :]
    source = qkv + (image * QKV_ROWS + token) * QKV_STRIDE + within
    place = (image * TOTAL + START + token) * H * D + within
    e = tl.arange(0, 2 * BD)
    matrices = tl.load(rotation + (image * ROTATION_ROWS + START + token) * 2 * D + e, mask=e < 2 * D, other=0.0)
    from_even, from_odd = tl.split(tl.reshape(matrices.to(tl.float32), (BD // 2, 2, 2)))
    ee, eo = tl.split(from_even)
    oe, oo = tl.split(from_odd)
    scale = tl.load(query_scale + d, mask=in_d, other=0.0).to(tl.float32)
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    x = _normalise_and_rotate(x, scale, ee, oe, eo, oo, D, eps, BH, BD)
    tl.store(q + place, x.to(q.dtype.element_ty), mask=mask)
    scale = tl.load(key_scale + d, mask=in_d, other=0.0).to(tl.float32)
    x = tl.load(source + H * D, mask=mask, other=0.0).to(tl.float32)
    x = _normalise_and_rotate(x, scale, ee, oe, eo, oo, D, eps, BH, BD)
    tl.store(k + place, x.to(k.dtype.element_ty), mask=mask)
    if HAS_VALUE:
        tl.store(v + place, tl.load(source + 2 * H * D, mask=mask, other=0.0), mask=mask)


def rotary_query_key_value(
    parts: Sequence[tuple[Tensor, Tensor, Tensor, float]],  # qkv [B, T, 3HD], query and key scale [D], eps
    rotation: Tensor,  # [B or 1, 1, all T, D / 2, 2, 2]
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [B, H, T, D] over all parts' tokens, as views of [B, T, H, D].

    The value of a single part is a view of its projection.
    """
    qkv, head = parts[0][0], parts[0][1].shape[0]
    batch, total, joined = qkv.shape[0], rotation.shape[2], len(parts) > 1
    shape = (batch, total, qkv.shape[2] // (3 * head), head)
    q, k = qkv.new_empty(shape), qkv.new_empty(shape)
    v = qkv.new_empty(shape) if joined else qkv.unflatten(-1, (3, -1, head))[:, :, 2]
    rotation, start = rotation.contiguous(), 0
    for part in parts:
        _write(part, rotation, q, k, v if joined else None, start)
        start += part[0].shape[1]
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _write(
    part: tuple[Tensor, Tensor, Tensor, float],
    rotation: Tensor,
    q: Tensor,  # [B, T, H, D]
    k: Tensor,
    v: Tensor | None,
    start: int,
) -> None:
    """Normalises and rotates one part into the rows from ``start`` on."""
    qkv, query_scale, key_scale, eps = part
    batch, tokens, _ = qkv.shape
    total, heads, head = q.shape[1:]
    rows, several = as_rows(qkv), rotation.shape[0] > 1
    block = min(HEADS, triton.next_power_of_2(heads))
    launch(rotary_kernel, (batch * tokens, triton.cdiv(heads, block)),
        rows.tensor, rotation, query_scale, key_scale, q, k, q if v is None else v, tokens, total, start,
        rows.image, total if several else 0, rows.row, heads, head, eps,
        v is not None, block, triton.next_power_of_2(head), num_warps=2,
    )  # fmt: skip
