"""Handles patches of other packs in a forward that is recorded.

The options get functions of ours in their place. A patch is *written down* if all that its code can read is known
(``state``): its operations are on the tape, and its state is a guard. If it is not known, changed in the forward, or if
the patch does what a tape cannot hold, it is *called* in each forward (``called_patches``). Which of the two is found
out once for each patch's code (``patch_book``).
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..reasons import say
from . import called_patches, patch_call
from .decisions import Decisions, forget
from .named_tensors import modules_of
from .options import MISSING, NotedOptions, Reads
from .overlaps import lie_apart
from .patch_book import PatchBook, code_of, shown
from .record import Recorder
from .refusals import Generators
from .state import Glance, look_at
from .swaps import swapped
from .values import Value, tensors_in, wrapped

FEW = 20_000  # objects of a patch's state that are looked at once, to see whether a call changes it
NONE: frozenset = frozenset()


class Patches:
    """The patches among the options of one recording.

    whole: the model's whole forward is recorded. In the recording of a block no patch is called in each forward.
    """

    def __init__(self, options: NotedOptions, recorder: Recorder, book: PatchBook, whole: bool = True) -> None:
        self.again = False  # one more recording may go better: it is known now which patches have to be called
        self.holds = False  # what they give must be kept in a replay: they must not be called twice
        self.calls: list[called_patches.LiveCall] = []
        self.called: set[tuple] = set()  # the places of patches that the forward called, in either way
        self._recorder, self._book, self._whole = recorder, book, whole
        self._module = recorder.module  # the recorder lets go of it at the end
        self._raw = {key: dict.get(options, key) for key in dict.keys(options)}
        self._reads: Reads = options._reads
        self._states: dict[tuple, tuple[Any, Any]] = {}  # of those that are written down: (patch, state before)
        self._looks: dict[int, Any] = {}  # states before, by the patches' ids
        self._prepared: set[int] = set()  # ids of the code of patches that have a second chance
        self._parts: set[int] | None = None
        self.glance = Glance(recorder.module)  # at what patches were before they were called
        self._decisions = Decisions(
            lambda: recorder.refuse(say("read_back")), recorder.not_listening,
            lambda new, tensor: recorder.mark(new, recorder.value(tensor)),
        )  # fmt: skip
        self._all: dict[tuple, Callable[..., Any]] = {}
        self._before: tuple = ()  # see ``_kept``
        self._inside = 0
        self._echoes: dict[Value, list[weakref.ref[Tensor]]] = {}  # and who else has that memory, see ``_live``
        for kind in patch_call.KINDS:
            if self._raw.get(kind) and options.notes(kind):
                if whole:
                    options.get(kind)  # noted: other patches, another recording
                # those around a block, which it does not look at, do not matter to it
                options.hide(kind, wrapped(self._raw[kind], self._proxy, (kind,)), noted=not whole)

    def _proxy(self, place: tuple, patch: Callable[..., Any]) -> Callable[..., Any]:
        self._all[place] = patch

        def call(*args: Any, **kwargs: Any) -> Any:
            recorder = self._recorder
            self.called.add(place)
            if recorder.is_deaf or self._inside:
                return patch(*args, **kwargs)
            who = code_of(patch)
            if self._book.is_odd(who):
                recorder.refuse(say("patch_form", patch=shown(patch)))
                return patch(*args, **kwargs)
            if not self._book.is_live(who) and place not in self._states:
                if id(patch) not in self._looks:  # one at several places may keep something from one to the next
                    state, tensors = self.glance.look(patch), self.glance.seen.new_tensors()
                    named = state is None or any(map(recorder.has_a_name, tensors))
                    self._looks[id(patch)] = None if named else state
                    self._leaves(() if named else tensors)
                if self._looks[id(patch)] is None:
                    self._book.live(who)
                else:
                    self._states[place] = patch, self._looks[id(patch)]
            self._inside += 1
            try:
                if self._book.is_live(who):
                    return self._live(place, patch, who, args, kwargs)
                return self._written_down(patch, who, args, kwargs)
            finally:
                self._inside -= 1

        return call

    def _may_prepare(self, patch: Any) -> bool:
        """Whether a patch that changed itself has one more chance to be written down: a network makes that worth it."""
        who = code_of(patch)
        if hasattr(patch, "models") and id(who) not in self._prepared and self._book.may_prepare(who):
            self._prepared.add(id(who))
        return id(who) in self._prepared

    def _leaves(self, tensors: Iterable[Tensor]) -> None:
        """What a patch keeps on the device is read where it lies, at each replay."""
        for tensor in self._recorder.hold(tensors, self._recorder.device):
            self._recorder.calls_packs = True
            self._reads.leaves[id(tensor)] = weakref.ref(tensor)

    # Written down -------------------------------------------------------------------------------------------------

    def _written_down(self, patch: Callable[..., Any], who: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        recorder, given = self._recorder, []

        def noting(item: Any) -> Any:
            """Options as a dict that notes each read of what is the caller's."""
            if not patch_call.is_options(item, self._raw):
                return item
            if isinstance(item, NotedOptions):
                noted = item
            else:
                own = frozenset(name for name, value in item.items() if self._raw.get(name, MISSING) is not value)
                noted = NotedOptions(item, self._reads, own | patch_call.RAW)
                given.append((item, noted))
            strict.append((noted, noted.strict))
            noted.strict, noted.decisions = True, self._decisions
            return noted

        strict: list[tuple[NotedOptions, bool]] = []
        plain, numbers = (args, kwargs), self._decisions.given
        recorder.writes.echoes = {echo for echo in self._echoes if self._is_shared(echo)}
        args, kwargs = tuple(_each(item, noting) for item in args), {k: _each(v, noting) for k, v in kwargs.items()}
        try:
            return patch(*args, **kwargs)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            if self._decisions.given == numbers:
                raise
            self._decisions.used()  # it did not take a number of ours for one
        finally:
            recorder.writes.echoes = NONE
            for noted, before in strict:
                noted.strict, noted.decisions = before, None
            for theirs, noted in given:  # what it wrote is for later patches
                if list(map(id, dict.values(noted))) != list(map(id, theirs.values())):
                    theirs.clear()
                    theirs.update({key: dict.get(noted, key) for key in dict.keys(noted)})
            if recorder.refusal:
                if Glance(self._module).look(patch) == self._looks[id(patch)] or not self._may_prepare(patch):
                    self._book.live(who)
                self.again = True
        return patch(*plain[0], **plain[1])

    # Called in each forward -----------------------------------------------------------------------------------------

    def _live(self, place: tuple, patch: Callable[..., Any], who: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        recorder = self._recorder
        if not self._whole:
            recorder.refuse(say("patched_block", patch=shown(patch)))
            return patch(*args, **kwargs)
        try:
            given = patch_call.template((args, kwargs), self._raw, self._is_part, patch_call.Owners(self._raw))
        except patch_call.NotKnown as error:
            recorder.refuse(say("patch_argument", patch=shown(patch), kind=str(error)))
            return patch(*args, **kwargs)
        call = called_patches.LiveCall(place, who, shown(patch))
        with recorder.not_listening():
            if not self.calls:
                self._before = self._kept()
            done = patch_call.perform(patch, *given, self._raw)
            recorder.guarded(lambda: call.record(done))
            self.calls.append(call)
            originals = _once(given)
            wrong = self._write_back(originals, done)
            # For each echo its original's memory, for whoever writes there. On a tape it is another value: at another
            # call the patch may give something else in its place.
            aliases = {id(echo.tensor): echo.of(originals[echo.number]).detach() for echo in done.echoes}
        if not done.fits:
            recorder.refuse(say("patch_writes_options", patch=shown(patch)))
        elif wrong:
            recorder.refuse(say("patch_writes_input", patch=shown(patch)))
        if done.wrote is not None:
            patch_call.give_back((args, kwargs), self._raw, swapped(done.wrote, aliases))
        if not recorder.refusal:
            recorder.guarded(lambda: self._note(call, (given, originals), done, aliases))
        return swapped(done.out, aliases)

    def _write_back(self, originals: Sequence[Tensor], done: patch_call.Done) -> bool:
        """Gives what the patch wrote into its tensors to the originals. Whether that cannot be on a tape."""
        wrong, value = False, self._recorder.value
        for number in done.give_to(originals):
            tensor, root = originals[number], value(originals[number]).root
            others = (each for each in originals if each is not tensor and value(each).root is root)
            # It was written past torch's counts, is a part of what else the patch was given, or an echo.
            wrong |= root.leaf is not None or number not in done.written
            wrong |= not all(lie_apart(tensor, each) for each in others) or self._is_shared(root)
        return wrong

    def _is_shared(self, echo: Value) -> bool:
        """Whether somebody still has what a patch gave back as it was, besides those to whom it gave it."""
        return any(other() is not None for other in self._echoes.get(echo, ()))

    def _note(
        self, call: called_patches.LiveCall, args: tuple[tuple, Sequence[Tensor]], done: patch_call.Done,
        aliases: Mapping[int, Tensor],
    ) -> None:  # fmt: skip
        recorder, (given, originals) = self._recorder, args
        recorder.step(call, given, done.tensors)
        for echo in done.echoes:
            recorder.mark(aliases[id(echo.tensor)], recorder.value(echo.tensor))
            others = [
                aliases[id(each.tensor)] for each in done.echoes if each is not echo and each.number == echo.number
            ]
            self._echoes[recorder.value(echo.tensor)] = list(map(weakref.ref, (originals[echo.number], *others)))
        shared = set()
        for number, (tensor, copy) in enumerate(zip(originals, done.copies, strict=True)):
            value = recorder.value(tensor)
            if value.leaf is None and value.base is None and not self._is_shared(value):  # now what the patch left
                recorder.mark(tensor, recorder.value(copy))
            else:
                shared.add(number)
                if number in done.written:
                    tensor.copy_(copy)
        call.shared, call.written = frozenset(shared), done.written & shared
        recorder.calls_packs = True

    def _kept(self) -> tuple:
        """What patches keep from call to call, as far as it can be seen, and of generators that they may draw from."""
        return look_at(self._all.values(), self._module, FEW), Generators.now(self._recorder.device)

    def _is_part(self, module: Any) -> bool:
        if self._parts is None:
            self._parts = {id(part) for _, part in modules_of(self._recorder.module)}
        return id(module) in self._parts

    def shown(self) -> str:
        """Which patches are called in the forward, and how often; "" if none is."""
        names = ", ".join(dict.fromkeys(call.name for call in self.calls))
        return say("patch_called", patch=names, calls=len(self.calls)) if names else ""

    # The end --------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """After the forward. What a patch that was written down has changed shows that it must be called."""
        if self.calls:
            self.holds = None in self._before[0] or self._before != self._kept()
            states = {} if self.holds else dict(zip(self._all, self._before[0], strict=True))
            self._reads.called = {call.place: states.get(call.place) for call in self.calls}
        self._decisions.end()
        self._reads.decisions, self._reads.idle = self._decisions.found, self._all.keys() - self.called
        now = Glance(self._module)
        for place, (patch, state) in self._states.items():
            if self._book.is_live(code_of(patch)):
                continue
            if now.look(patch) != state:
                if self._decisions.given:
                    forget(patch)
                if not self._may_prepare(patch):
                    self._book.live(code_of(patch))
                self.again = True
            else:
                self._reads.states[place] = state
        if not self.again and not self._recorder.refusal:
            self._book.went_well(bool(self._reads.states))


def _each(item: Any, noting: Callable[[Any], Any]) -> Any:
    """``noting`` of a patch's argument, and of what lies in a plain dict of arguments."""
    found = noting(item)
    if found is item and type(item) is dict:
        for name, each in item.items():
            if isinstance(each, dict) and (noted := noting(each)) is not each:
                item[name] = noted  # the model's own dict: the patch may write into it
    return found


def _once(given: Any) -> list[Tensor]:
    """The tensors of a template, each once, in order."""
    return list({id(tensor): tensor for tensor in tensors_in(given)}.values())
