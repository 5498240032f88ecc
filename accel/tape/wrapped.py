"""Operations on tensors that wrap others, as quantised weights do: one step each, if the class computes past torch.

Such a class takes an operation apart itself, and what it does inside goes on the tape. A class that computes past
torch's dispatcher leaves memory that nothing has written, and one with tables of its own reads tensors from nowhere.
What was written down of that operation is dropped then, and it becomes one step: at each replay the wrapping tensor is
put together again from its parts, and asked for the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from . import static_sizes
from .named_tensors import PLAIN, is_dressed
from .refusals import APART
from .traits import is_product, traits
from .values import Operation, Sizes, Value


class Form(NamedTuple):
    """What a wrapping tensor is besides its parts. place: among the arguments."""

    place: int
    kind: Any
    names: tuple[str, ...]
    context: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def key(self) -> tuple:
        """What makes it another one."""
        return self.place, self.kind, self.names, repr(self.context), self.size, self.stride


class Step:
    """``func`` of arguments of which some are the parts of wrapping tensors, as tuples."""

    def __init__(self, func: Callable[..., Tensor], forms: tuple[Form, ...]) -> None:
        self.func, self._forms = func, forms
        self.is_product = is_product(traits(func).name)
        self.likeness = Step, func, tuple([form.key for form in forms])  # what a plan depends on

    def sizes(self, operation: Operation, output: Value) -> Sizes | None:
        """As a rule of ``static_sizes``."""
        fits = self.is_product and isinstance(operation.args[0], Value)
        return static_sizes.quantised_product(operation, output) if fits else None

    def __call__(self, *args: Any) -> Tensor:
        """The result."""
        given = list(args)
        for form in self._forms:
            parts = dict(zip(form.names, given[form.place], strict=True))
            given[form.place] = form.kind.__tensor_unflatten__(parts, form.context, form.size, form.stride)
        return self.func(*given)


class Wrapped:
    """Those of one recording."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._steps: dict[tuple, Step] = {}  # operations that are known to be computed apart

    def run(self, func: Any, types: tuple[type, ...], args: tuple, kwargs: dict[str, Any]) -> Any:
        """What ``func`` gives, as its arguments' own class computes it; written down, whole or in its parts."""
        recorder = self._recorder
        kind = next(kind for kind in types if kind not in PLAIN and not is_dressed(kind))
        step = recorder.guarded(lambda: self._step(func, args, kwargs))
        if step is not None and step.likeness in self._steps:
            with recorder.not_listening():
                out = func(*args, **kwargs)
            self._write(step, args, out)
            return out
        before = recorder.place()
        outer, recorder.in_wrapped = recorder.in_wrapped, True
        try:
            with recorder:
                out = kind.__torch_dispatch__(func, types, args, kwargs)
        finally:
            recorder.in_wrapped = outer
        if step is not None and recorder.guarded(lambda: self._is_apart(out) and recorder.back_to(before)):
            self._steps[step.likeness] = step
            self._write(step, args, out)
        return out

    def _is_apart(self, out: Any) -> bool:
        """Whether the class has computed ``out`` in a way that no tape can hold, and nothing else is against one."""
        if type(out) not in PLAIN:
            return False
        missing = self._recorder.writes.are_missing([self._recorder.value(out)])
        reason = self._recorder.refusal
        return (missing and not reason) or reason.startswith(APART)

    def _step(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Step | None:
        """The operation as one step; None where it cannot be one."""
        if kwargs or traits(func).writes >= 0:
            return None
        forms = []
        for place, item in enumerate(args):
            if not isinstance(item, Tensor) or type(item) in PLAIN or is_dressed(type(item)):
                continue
            if not hasattr(type(item), "__tensor_unflatten__"):
                return None
            names, context = item.__tensor_flatten__()
            parts = [getattr(item, name) for name in names]
            if not all([type(part) in PLAIN for part in parts]):  # wrapped twice
                return None
            forms.append(Form(place, type(item), tuple(names), context, tuple(item.size()), item.stride()))
        made = Step(func, tuple(forms))
        return self._steps.get(made.likeness, made) if forms else None

    def _write(self, step: Step, args: tuple, out: Tensor) -> None:
        given = list(args)
        for form in step.likeness[2]:
            given[form[0]] = tuple([getattr(args[form[0]], name) for name in form[2]])
        self._recorder.guarded(lambda: self._recorder.step(step, tuple(given), [out]))
