"""When a recording fits a call: the options that its forward read are the same, and so are sizes, dtypes and code.

On the CPU, no ComfyUI.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tools import embed

embed.bare_pack()

from anyshape.accel.key import shape_key  # noqa: E402 - the package exists from the line above on
from anyshape.accel.take import Taped  # noqa: E402
from anyshape.accel.tape.guards import Guards  # noqa: E402
from anyshape.accel.tape.options import NotedOptions, Reads  # noqa: E402
from anyshape.accel.tapes import MAX_IN_VAIN, MAX_STRUCTURES, Tapes  # noqa: E402

from tools.small_forwards import inputs, module  # noqa: E402

# Options --------------------------------------------------------------------------------------------------------------


def noted(options, read):
    """The guards of what ``read`` reads of the options, and the tensors among it."""
    tensors = []
    reads = Reads(tensors.append)
    read(NotedOptions(options, reads))
    return Guards(reads), tensors


READS = {
    "[]": lambda d: d["a"],
    "get": lambda d: d.get("a"),
    "in": lambda d: "a" in d,
    "copy": lambda d: d.copy().get("a"),
    "copy of a copy": lambda d: d.copy().copy()["a"],
    "**": lambda d: {**d},
    "dict": lambda d: dict(d),
    "|": lambda d: d | {},
    "| the other way": lambda d: {} | d,
    "items": lambda d: list(d.items()),
    "values": lambda d: list(d.values()),
    "for": lambda d: [d[key] for key in d],
    "for keys": lambda d: [d[key] for key in d.keys()],  # noqa: SIM118
    "keys as a set": lambda d: d.keys() & {"a"},
    "in keys": lambda d: "a" in d.keys(),  # noqa: SIM118
    "update": lambda d: {}.update(d),
    "pop": lambda d: d.pop("a"),
    "setdefault": lambda d: d.setdefault("a", 3),
    "==": lambda d: d == {},
    "deepcopy": lambda d: __import__("copy").deepcopy(d),
    "after a broken loop": lambda d: (next(iter(d)), d["a"]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_every_way_of_reading_an_option_is_a_guard(read) -> None:
    guards, _ = noted({"a": 1, "b": 2}, read)
    assert guards.differs({"a": 1, "b": 2}) == ""
    assert guards.differs({"b": 2}) == "a"
    if READS["in"] is not read:
        assert guards.differs({"a": 2, "b": 2}) == "a"
        assert guards.differs({"a": True, "b": 2}) == "a"


def test_what_was_not_read_does_not_matter() -> None:
    guards, _ = noted({"a": 1, "b": 2}, lambda d: d["a"])
    assert guards.differs({"a": 1}) == guards.differs({"a": 1, "b": 3, "c": object()}) == ""


@pytest.mark.parametrize("read", [lambda d: len(d), lambda d: bool(d), lambda d: list(d), lambda d: sorted(d.keys())])
def test_looking_at_the_keys_is_a_guard(read) -> None:
    guards, _ = noted({"a": 1}, read)
    assert guards.differs({"a": 5}) == "" and guards.differs({"a": 1, "b": 2}) == "b" and guards.differs({}) == "a"


def test_a_missing_option_is_a_guard() -> None:
    guards, _ = noted({}, lambda d: d.get("a"))
    assert guards.differs({}) == "" and guards.differs({"a": None}) == "a"


def test_what_the_forward_wrote_is_its_own() -> None:
    def read(d):
        d["block"] = 3
        d |= {"more": 1}
        d.update(last=2)
        copied = d.copy()
        return d["block"], copied["block"], d["more"], d.get("last"), list(copied.items())

    guards, _ = noted({"a": 1, "block": 9}, read)
    assert guards.differs({"a": 1}) == "" and guards.differs({"a": 1, "block": 4}) == "" and guards.differs({"a": 2})


def test_tensors_are_inputs_and_functions_are_compared_by_identity() -> None:
    class Pack:
        def patch(self):
            pass

    def function():
        pass

    pack, other = Pack(), Pack()
    options = {"t": torch.ones(2), "f": function, "m": pack.patch, "d": torch.device("cpu"), "n": {"k": [1, (2,)]}}
    guards, tensors = noted(options, lambda d: dict(d))
    assert guards.tensors == ["t"] and tensors[0] is options["t"]
    same = {"t": torch.zeros(2), "f": function, "m": pack.patch, "d": torch.device("cpu"), "n": {"k": [1, (2,)]}}
    assert guards.differs(same) == ""
    assert guards.differs(same | {"t": torch.ones(3)}) == guards.differs(same | {"t": torch.ones(2).half()}) == "t"
    assert guards.differs(same | {"t": None}) == "t"
    assert guards.differs(same | {"f": lambda: None}) == "f" and guards.differs(same | {"m": other.patch}) == "m"
    assert guards.differs(same | {"n": {"k": [1, (3,)]}}) == "n"
    assert guards.differs(same | {"d": torch.device("meta")}) == "d"


def test_a_value_that_the_forward_changes_is_guarded_as_it_was() -> None:
    state = {"seen": []}
    guards, _ = noted({"state": state}, lambda d: d["state"]["seen"].append(1))
    assert guards.differs({"state": state}) == "state" and guards.differs({"state": {"seen": []}}) == ""


def test_a_copied_option_that_is_read_afterwards_is_a_guard() -> None:
    """Of what differs in every run only the copying is not noted."""
    copied, _ = noted({"uuids": [1], "a": 1}, lambda d: {key: d[key] for key in d})
    assert copied.differs({"uuids": [2], "a": 1}) == "" and copied.differs({"uuids": [1], "a": 2}) == "a"
    read, _ = noted({"uuids": [1], "a": 1}, lambda d: ([key for key in d], d["uuids"]))
    assert read.differs({"uuids": [2], "a": 1}) == "uuids"

    def stopped(d):
        for _ in d:
            break
        return d["uuids"]

    assert noted({"uuids": [1]}, stopped)[0].differs({"uuids": [2]}) == "uuids"


@pytest.mark.parametrize("copy", [lambda d: {**d}, lambda d: dict(d), lambda d: {}.update(d)])
def test_a_plain_copy_of_all_options_is_no_look_at_what_differs_in_every_run(copy) -> None:
    """LTX-Video's forward begins with one. Python lists all keys for it first, and then asks for each of them."""
    options = {"uuids": [1], "sample_sigmas": torch.ones(5), "a": 1, "cond_or_uncond": [0], "sigmas": torch.ones(1)}
    guards, _ = noted(options, copy)
    assert guards.differs(options | {"uuids": [2], "sample_sigmas": torch.ones(9)}) == ""
    assert guards.differs(options | {"a": 2}) == "a" and guards.differs(options | {"cond_or_uncond": [1]})
    assert guards.differs(options | {"sigmas": torch.ones(2)}) == "sigmas"


@pytest.mark.parametrize(
    "read",
    [
        lambda d: (list(d), d["uuids"]),
        lambda d: (list(d), d["uuids"], d["b"], d["a"]),
        lambda d: (list(d), d["uuids"], d.get("missing")),
        lambda d: ({**d}, d["uuids"]),
        lambda d: (dict(d.copy()), list(d), d["uuids"]),
    ],
)
def test_what_is_asked_for_by_name_after_the_keys_were_listed_is_a_guard(read) -> None:
    guards, _ = noted({"uuids": [1], "a": 1, "b": 2}, read)
    assert guards.differs({"uuids": [2], "a": 1, "b": 2}) == "uuids"


def test_a_copy_with_keys_of_the_forwards_own() -> None:
    def read(d):
        d["block"] = 3
        return {**d}

    guards, _ = noted({"uuids": [1], "a": 1}, read)
    assert guards.differs({"uuids": [2], "a": 1}) == "" and guards.differs({"uuids": [1], "a": 2}) == "a"


# Takes ----------------------------------------------------------------------------------------------------------------


class Calls:
    """Tapes of one model, called with options."""

    def __init__(self, forward, **attributes) -> None:
        self.model, self.tapes, self.changes = module(forward, **attributes), Tapes(), ""
        self.run = 0

    def taped(self, options, x, structure=1):
        return Taped(
            self.model, lambda noted: self.model(x, noted), options, structure, lambda *_: None, lambda: self.changes,
            run=self.run,
        )  # fmt: skip

    def record(self, options, x=None, structure=1):
        x = inputs(0) if x is None else x
        return self.tapes.record(shape_key({"x": x}), False, self.taped(options, x, structure), {"x": x})

    def find(self, options, x=None, structure=1):
        x = inputs(0) if x is None else x
        return self.tapes.find(shape_key({"x": x}), False, self.taped(options, x, structure))


def test_takes_fit_sizes_dtypes_options_and_code() -> None:
    calls = Calls(lambda self, x, o: x * 2 if o.get("double") else x * o["t"])
    double, single = {"double": True}, {"t": torch.ones(4)}
    first, second = calls.record(double)[1], calls.record(single)[1]
    assert calls.find(double | {"unread": 1}) is first and calls.find(single) is second
    assert second.inputs({"x": inputs(0)}, single)["option t"] is single["t"]
    assert calls.find({"t": torch.ones(3, 4)}) is None and calls.find({"double": 1}) is None
    assert calls.find(double, inputs(0, 2, 4)) is None and calls.find(double, inputs(0).half()) is None
    assert calls.find(double, structure=2) is None and calls.find(double) is first, "its code is as it was"
    assert all(calls.find(double, structure=2 + number) is None for number in range(MAX_STRUCTURES))
    assert calls.find(double) is None, "it was another one too often since"


def test_all_calls_of_a_first_run_of_one_step_are_its_first() -> None:
    calls, x = Calls(lambda self, x, o: x * 2), inputs(0)
    key, taped = shape_key({"x": x}), replace(calls.taped({}, x), once=True, run=1)
    for _ in range(2):
        assert "when this size comes again" in calls.tapes.in_vain(key, False, taped)
    assert calls.tapes.in_vain(key, False, replace(taped, run=2)) == ""
    assert calls.tapes.in_vain(shape_key({"x": inputs(0, 5, 4)}), False, replace(taped, once=False)) == ""


def test_an_option_that_differs_in_each_call_is_not_recorded_for_ever() -> None:
    calls, x = Calls(lambda self, x, o: x * o["sigma"]), inputs(0)
    key = shape_key({"x": x})
    for step in range(MAX_IN_VAIN):
        assert calls.tapes.in_vain(key, False, calls.taped({"sigma": step + 0.5}, x)) == ""
        calls.record({"sigma": step + 0.5})
    assert "'sigma'" in calls.tapes.in_vain(key, False, calls.taped({"sigma": 9.5}, x))
    assert calls.tapes.in_vain(shape_key({"x": inputs(0, 5, 4)}), False, calls.taped({"sigma": 9.5}, x)) == ""
    assert calls.find({"sigma": 9.5}).in_blocks
    patched = {"sigma": 9.5, "patches": {"attn1_patch": [lambda q, k, v, options: (q, k, v)]}}
    assert calls.find(patched) is None and calls.tapes.in_vain(key, False, calls.taped(patched, x)) == ""


def given_up() -> tuple[Calls, Callable[..., str]]:
    """A model whose option differed in each call of its first run, and what says why calls are in vain."""
    calls, x = Calls(lambda self, x, o: x * o["sigma"] * o.get("scale", 1.0)), inputs(0)

    def in_vain(structure: int, **options) -> str:
        return calls.tapes.in_vain(shape_key({"x": x}), False, calls.taped(options, x, structure))

    for step in range(MAX_IN_VAIN):
        calls.record({"sigma": step + 0.5})
    assert in_vain(1, sigma=9.5) and calls.find({"sigma": 9.5}).in_blocks
    calls.run = 1
    return calls, in_vain


def test_a_model_that_a_pack_patches_again_in_each_run_is_recorded_once_in_most() -> None:
    """Its patches are other objects each time, so the model is another one. It meets what it met in an earlier run."""
    calls, in_vain = given_up()
    for run in range(2, MAX_STRUCTURES + 2):
        calls.run = run
        assert calls.find({"sigma": 0.5}, structure=run) is None
        assert in_vain(run, sigma=0.5) == "", "that may have been the last time"
        calls.record({"sigma": 0.5}, structure=run)
        if run <= MAX_STRUCTURES:
            assert "'sigma'" in in_vain(run, sigma=1.5) and calls.find({"sigma": 2.5}, structure=run).in_blocks
    assert in_vain(run, sigma=1.5) == "", "it is long since the model was tried"


def test_what_differs_in_another_way_than_before_is_recorded_as_often_as_ever() -> None:
    calls, in_vain = given_up()
    calls.record({"sigma": 0.5}, structure=2)
    assert in_vain(2, sigma=0.5, scale=2.0) == ""
    patched = {"patches": {"attn1_patch": [lambda q, k, v, options: (q, k, v)]}}
    calls.record({"sigma": 0.5} | patched, structure=3)
    assert in_vain(3, sigma=1.5, **patched) == "", "with that patch it was not met before"
    calls.record({"sigma": 0.5}, structure=4)
    assert calls.find({"sigma": 0.5}, structure=4) and in_vain(4, sigma=1.5) == "", "a later call could use it"


def test_a_model_that_stays_and_settles_is_recorded_again_in_the_next_run() -> None:
    """One recording in vain is little to go by: it is believed for one run."""
    calls, in_vain = given_up()
    calls.record({"sigma": 0.5}, structure=2)
    assert in_vain(2, sigma=1.5) and calls.find({"sigma": 1.5}, structure=2).in_blocks
    calls.run = 2
    assert calls.find({"sigma": 1.5}, structure=2) is None and in_vain(2, sigma=1.5) == ""
    settled = calls.record({"sigma": 1.5}, structure=2)[1]
    assert calls.find({"sigma": 1.5}, structure=2) is settled and in_vain(2, sigma=0.7) == ""


def test_a_model_that_stays_and_never_settles_is_given_up() -> None:
    calls, in_vain = given_up()
    for run in range(1, MAX_IN_VAIN + 1):
        calls.run = run
        assert in_vain(2, sigma=run + 0.5) == ""
        calls.record({"sigma": run + 0.5}, structure=2)
        assert in_vain(2, sigma=run + 0.7)
    calls.run += 1
    assert calls.find({"sigma": 9.5}, structure=2).in_blocks


def test_a_tensor_that_comes_by_two_ways_is_refused() -> None:
    calls, x = Calls(lambda self, x, o: x * o["t"] + o["u"]), inputs(0)
    assert "another way" in calls.record({"t": x, "u": torch.ones(4)}, x)[1].reason
    assert calls.record({"t": torch.ones(4), "u": torch.ones(4)}, x)[1].reason == ""


def test_a_forward_that_changes_its_model_is_refused() -> None:
    calls = Calls(lambda self, x, o: x * 2)
    calls.changes = "counter (4)"
    _, take, tape = calls.record({})
    assert tape is None and "counter (4)" in take.reason


class Cache:
    """What a node puts among the options, for the forward to fill."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


def test_a_forward_that_keeps_something_in_an_option_is_refused() -> None:
    """A replay would not fill it: Wan Animate 2's cache of the pose stayed empty from the second prompt on."""

    def forward(self, x, o):
        if not o["cache"].kept:
            o["cache"].kept.append(x * 2)
        return x + o["cache"].kept[0]

    calls, options = Calls(forward), {"cache": Cache()}
    out, take, tape = calls.record(options)
    assert tape is None and "'cache'" in take.reason and take.in_blocks and not take.twice
    assert torch.equal(out, inputs(0) * 3) and calls.find({"cache": Cache()}) is None
    only_read = Calls(lambda self, x, o: x + len(o["cache"].kept))
    assert only_read.record(options)[2] is not None
