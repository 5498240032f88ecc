"""When a plan needs no whole forward of ComfyUI's to be compared with: once it was right at other sizes.

A plan knows no size. Programs of two sizes that share one differ in their numbers alone, and each number is looked at
when the plan is reused (``reuse``). So what a whole forward could still show is a kernel that is wrong at some size,
and each kernel can be compared by itself (``kernel_check``), which takes few milliseconds of the host's.
"""

from collections.abc import Hashable
from dataclasses import dataclass

ENOUGH = 2  # sizes that were compared whole: the one that the plan was made for, and one that reused it
REACH = 2  # a size with more than so many times the elements of those, in any input, is compared whole again
NEAR = 1.25  # up to so many times the elements, a forward does not take much longer

Elements = tuple[int, ...]  # elements of each input


@dataclass
class Trust:
    """How far one plan may be trusted. about: what the rest is about; with another model's code all begins again."""

    about: Hashable = None
    compared: int = 0  # sizes
    largest: Elements = ()
    brief: Elements = ()  # the largest whose forward did not take the GPU long

    def covers(self, about: Hashable, sizes: Elements) -> bool:
        """Whether a forward of these sizes need not be compared whole."""
        return about == self.about and self.compared >= ENOUGH and _within(sizes, self.largest, REACH)

    def is_brief(self, sizes: Elements) -> bool:
        """Whether a forward of these sizes is known not to take the GPU long."""
        return _within(sizes, self.brief, NEAR)

    def add(self, about: Hashable, sizes: Elements, long: bool) -> None:
        """Notes that a forward of these sizes was compared whole, and whether it took the GPU long."""
        if about != self.about:
            self.about, self.compared, self.largest, self.brief = about, 0, (), ()
        self.compared += 1
        self.largest = _largest(self.largest, sizes)
        if not long:
            self.brief = _largest(self.brief, sizes)


def _within(sizes: Elements, known: Elements, times: float) -> bool:
    return len(sizes) == len(known) and all(n <= times * most for n, most in zip(sizes, known, strict=True))


def _largest(known: Elements, sizes: Elements) -> Elements:
    return tuple(map(max, known, sizes)) if known else sizes
