"""Functions that a pack makes again at each step, in the place of ComfyUI's: what they hold says what they do. CPU."""

import functools

import pytest

from tools.driving import compiled, sample_tiny
from tools.oracles import error, fallbacks, shapes
from tools.patching import read_back

pytestmark = pytest.mark.usefixtures("clean_stats", "one_thread")

CLOSE = 1e-5  # relative L2 in fp32
CHANGED = 1e-3  # by how much a change must show, so that a test can tell
NAME, BLOCKS = "QwenImage", 4
LATE = 4  # the step after which something changes
LATER = 1.5  # what is then in place of another number


class Setting:
    """What a pack's function holds."""

    def __init__(self, gain):
        self.gain, self.gains = gain, [gain]


def louder(own, gain, setting, before):
    """A pack's attention, of the same code each time."""

    def attention(*args, **kwargs):
        return own(*args, **kwargs) * gain * setting.gain * setting.gains[0]

    return attention


def with_defaults(own, gain, setting, before):
    def attention(*args, gain=gain, setting=setting, **kwargs):
        return own(*args, **kwargs) * gain * setting.gain * setting.gains[0]

    return attention


def scaled(own, gain, setting, *args, **kwargs):
    return own(*args, **kwargs) * gain * setting.gain * setting.gains[0]


def as_partial(own, gain, setting, before):
    return functools.partial(scaled, own, gain, setting)


def bound_again(own, gain, setting, before):
    """The last of those that are made stays, and gets another number where it has its own from."""
    if gain != LATER or before is own:
        return louder(own, gain, setting, before)
    place = before.__code__.co_freevars.index("gain")
    before.__closure__[place].cell_contents = gain
    return before


def attribute(number, setting):
    setting.gain = 1.0 if number < LATE else 1.5
    return 1.1, setting


def item(number, setting):
    setting.gains[0] = 1.0 if number < LATE else 1.5
    return 1.1, setting


OTHER = Setting(LATER)
CHANGES = {
    "nothing": lambda number, setting: (1.1, setting),
    "a number": lambda number, setting: (1.1 if number < LATE else LATER, setting),
    "a number's type": lambda number, setting: (1 if number < LATE else True, setting),
    "an attribute": attribute,
    "an item": item,
    "an object": lambda number, setting: (1.1, setting if number < LATE else OTHER),
}


@pytest.fixture
def images(tiny, monkeypatch):
    """Makes the pictures of two runs: with ComfyUI's own forward, or with ours. Its argument makes the function."""
    import comfy.ldm.qwen_image.model as module

    name = "optimized_attention_masked"
    own = getattr(module, name)

    def runs(fast, make, change, prepared=lambda model: None):
        patcher, setting, found = tiny(NAME, fresh=True), Setting(1.0), []
        prepared(patcher.model.diffusion_model)
        model = compiled(patcher) if fast else patcher
        with monkeypatch.context() as patch:

            def step(number, *_):
                new = make(own, *change(number, setting), getattr(module, name))
                patch.setattr(module, name, new)

            for seed in range(2):
                step(0)
                found.append(sample_tiny(model, NAME, seed=seed, steps=9, callback=step))
        return found

    return runs


@pytest.fixture
def wanted(images, eager):
    """ComfyUI's pictures by change, which are the same however a function is made."""

    def pictures(change):
        if change not in eager:
            eager[change] = images(False, louder, CHANGES[change])
        return eager[change]

    return pictures


@pytest.fixture(scope="module")
def eager():
    """What ``wanted`` has made."""
    return {}


@pytest.mark.parametrize("make", [louder, with_defaults, as_partial, bound_again])
@pytest.mark.parametrize("change", CHANGES)
def test_what_it_is_made_of(images, wanted, recordings, make, change):
    """That it is another object is no change, in the next run neither. What changes in it is one."""
    found = images(True, make, CHANGES[change])
    assert max(map(error, found, wanted(change))) < CLOSE
    assert len(recordings) <= (2 if change != "nothing" else 1)
    assert shapes()[-1]["state"] == "tape"


@pytest.mark.parametrize("make", [louder, as_partial, bound_again])
@pytest.mark.parametrize("change", CHANGES)
def test_blocks_with_programs(images, wanted, fusing, block_programs, make, change):
    """Where the whole cannot be recorded."""
    found = images(True, make, CHANGES[change], read_back)
    assert max(map(error, found, wanted(change))) < CLOSE
    assert len(block_programs) > 9 * BLOCKS


@pytest.mark.parametrize("change", ["nothing", "an attribute", "an item"])
def test_a_method_of_the_blocks_class(tiny, monkeypatch, fusing, block_programs, change):
    """A pack's, in the place of ComfyUI's, where the whole cannot be recorded."""
    change = CHANGES[change]

    def images(fast):
        patcher, setting, found = tiny(NAME, fresh=True), Setting(1.0), []
        model = patcher.model.diffusion_model
        read_back(model)
        kind = type(model.transformer_blocks[0])
        sampled = compiled(patcher) if fast else patcher
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", after(kind.forward, 1.1, setting))
            for seed in range(2):
                change(0, setting)
                found.append(
                    sample_tiny(sampled, NAME, seed=seed, steps=9, callback=lambda number, *_: change(number, setting))
                )
        return found

    wanted, found = images(False), images(True)
    assert max(map(error, found, wanted)) < CLOSE and block_programs


def after(own, gain, setting):
    """A block's forward, and a pack's factor on what it gives."""

    def forward(self, *args, **kwargs):
        return tuple([each * gain * setting.gain * setting.gains[0] for each in own(self, *args, **kwargs)])

    return forward


def test_one_that_counts_its_calls(images, fusing, block_programs):
    """It does something else in each block."""

    def counting(own, gain, setting, before):
        def attention(*args, **kwargs):
            setting.gains[0] += 0.1
            return own(*args, **kwargs) * setting.gains[0]

        return before if before is not own else attention

    wanted, found = (images(fast, counting, CHANGES["nothing"]) for fast in (False, True))
    assert max(map(error, found, wanted)) < CLOSE and not block_programs


def test_one_that_asks_which_block_it_is_in(images, fusing):
    """As RadialAttn does, which leaves the first blocks alone: then blocks are not alike."""

    def choosing(own, gain, setting, before):
        def attention(*args, **kwargs):
            return own(*args, **kwargs) * (1.0 + kwargs["transformer_options"]["block_index"] / 10)

        return attention

    wanted, found = (images(fast, choosing, CHANGES["nothing"]) for fast in (False, True))
    assert max(map(error, found, wanted)) < CLOSE
    assert shapes()[-1]["state"] == "tape" and not fallbacks()


def test_one_that_makes_something_at_its_first_call(images, fusing, recordings):
    """It is recorded at the second one."""

    def lazy(own, gain, setting, before):
        def attention(*args, **kwargs):
            setting.gains = setting.gains if len(setting.gains) > 1 else [1.0, 1.2]
            return own(*args, **kwargs) * setting.gains[1]

        return attention

    wanted, found = (images(fast, lazy, CHANGES["nothing"]) for fast in (False, True))
    assert max(map(error, found, wanted)) < CLOSE
    assert len(recordings) == 2 and shapes()[-1]["state"] == "tape" and not shapes()[-1]["note"]


def test_one_whose_content_nobody_can_see(images, fusing, recordings, block_programs):
    """It may be something else at each call."""

    def hidden(own, gain, setting, before):
        gains = iter([1.1] * 10_000)
        return lambda *args, **kwargs: own(*args, **kwargs) * next(gains)

    wanted, found = (images(fast, hidden, CHANGES["nothing"]) for fast in (False, True))
    assert max(map(error, found, wanted)) < CLOSE and not block_programs
