"""Tensors that a model keeps in ``functools.lru_cache``.

Such a function gives the same for the same arguments, and its arguments can be hashed: they are sizes and names. What
depends on an input would have had to come to the host for that, which the recorder notices.
"""

import functools
import gc

from torch import Tensor

WRAPPER = type(functools.lru_cache(lambda: None))


def is_memoised(tensor: Tensor) -> bool:
    """Whether ``tensor`` is the kept result of such a function. Takes as long as a collection, so ask last."""
    holders = gc.get_referrers(tensor)
    dicts = [holder for holder in holders if type(holder) is dict]  # where such a cache has no limit
    for each in dicts:
        holders += gc.get_referrers(each)
    return any(type(holder) is WRAPPER for holder in holders)
