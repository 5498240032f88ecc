"""Plans groups that repeat within one tape only once: a model's second block runs what was planned for the first.

Groups of the same operations on values of the same forms run the same kernels with the same numbers, on other values.
So each form of a group is planned once, and a model of sixty blocks takes hardly longer than one of two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .kernels import Launch
from .layout import Layouts
from .values import ONE, Operation, Size, Value, replaced

Steps = list[Operation | Launch]


@dataclass
class Form:
    """A group without its values: equal keys, equal kernels."""

    key: tuple
    values: list[Value]  # in the order in which the key counts them
    stored: list[int]  # of these, what the kernels store


@dataclass
class Planned:
    """What was planned for the first group of a form. parts: see ``Plan.parts``."""

    members: Sequence[Operation]
    form: Form
    steps: Steps
    parts: dict[Value, Value]


class Repeats:
    """What was planned for each form of a tape's groups."""

    def __init__(self) -> None:
        self._known: dict[tuple, Planned | str] = {}

    def find(self, form: Form) -> Planned | str | None:
        """The plan of an earlier group of this form, or why it is no kernel; None if there was none."""
        return self._known.get(form.key)

    def keep(self, form: Form, planned: Planned | str) -> None:
        """Remembers the plan of a group, or why there is none."""
        self._known[form.key] = planned


def form_of(members: Sequence[Operation], stored: Sequence[Value], fixed: set[Value], layouts: Layouts) -> Form:
    """The form of a group. fixed: of ``stored``, what must lie as it was recorded."""
    values: dict[Value, int] = {}
    forms: list[tuple] = []
    same: dict[Size, int] = {}  # sizes of the call that are equal at every size

    def place(value: Value) -> int:
        found = values.get(value)
        if found is None:
            found = values[value] = len(values)
            at: Any = None
            if value.base is not None:
                memory, start = layouts.memory(value)
                at = start, found if memory is value else place(memory)
            sizes = tuple([_kind(size, same) for size in value.sizes])
            form = value.dtype, value.shape, value.stride, value.order, sizes, type(value.leaf), value.scalar(), at
            forms.append((*form, value in fixed))
        return found

    def pattern(item: Any) -> Any:
        kind = type(item)
        if kind is Value:
            return "value", place(item)
        if kind in (list, tuple):
            return tuple([pattern(each) for each in item])
        if kind is dict:
            return tuple([(name, pattern(each)) for name, each in item.items()])
        return kind, item  # 1 is not True, nor 1.0

    operations = [
        (id(op.func), op.kind, pattern(op.args), pattern(op.kwargs), [value and place(value) for value in op.outputs])
        for op in members
    ]
    numbers = [values[value] for value in stored]
    key = tuple((*rest, tuple(outputs)) for *rest, outputs in operations), tuple(numbers), tuple(forms)
    return Form(key, list(values), numbers)


def _kind(size: Size, same: dict[Size, int]) -> int:
    """Whether a size is of the model, or which of the call's it is."""
    if size.static:
        return -1 if size is ONE else -2
    return same.setdefault(size.first, len(same))


def again(planned: Planned, form: Form, layouts: Layouts) -> tuple[Steps, dict[Value, Value]]:
    """(the steps of an earlier group on the values of another one of its form, its parts)."""
    mine = dict(zip(planned.form.values, form.values, strict=True))
    for number in form.stored:  # planning may have chosen other strides
        layouts.follow(form.values[number], planned.form.values[number])

    def own(value: Value | None) -> Value | None:
        if value is not None and value not in mine:  # planning made it
            mine[value] = made = value.twin()
            made.base = own(value.base)
        return value and mine[value]

    steps: Steps = []
    for step in planned.steps:
        outputs = [own(value) for value in step.outputs]
        if isinstance(step, Launch):
            steps.append(step.again(tuple([own(value) for value in step.operands]), tuple(outputs)))
        else:
            args, kwargs = (replaced(given, Value, own) for given in (step.args, step.kwargs))
            inputs = [own(value) for value in step.inputs]
            steps.append(Operation(step.func, args, kwargs, inputs, outputs, own(step.writes), step.opaque, step.kind))
    return steps, {own(place): own(part) for place, part in planned.parts.items()}
