"""Random models of repeated blocks in the engine, and which of their results are not eager's.

    python -m tools.random_blocks [--kind tokens|pictures|videos|sounds] [--first 0] [--seconds 60]

Blocks are chains of ``idioms``, alike but for their weights, over one stream or two, which they may write into. The
engine is asked for random sizes in turns, so that later ones are recorded short (one block of each kind) and run on
plans of earlier ones. The number of a model makes it again, until there are other idioms.
"""

import os
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from tools import draws, embed
from tools.idioms import IDIOMS
from tools.random_forwards import FUSED, LAID, SIZES, Draw, RandomForward, chain_of, interpreted

COUNT, CALLS = 4, 9  # blocks of each kind; calls of the engine
WAYS = ("one stream", "in place", "two streams", "a view", "by turns")


class RandomBlocks(nn.Module):
    """The model of this number. x and y of one size, vector [batch, 24]; gives a tensor like x."""

    def __init__(self, kind: str, number: int) -> None:
        super().__init__()
        draw = random.Random(f"blocks {kind} {number}")
        chains = [chain_of(kind, draw, draw.randint(2, 4)) for _ in range(4)]
        self.way, self.reads_back = draw.choice(WAYS), draw.random() < 0.3
        self.sizes = [draw.choice(SIZES[kind]) for _ in range(CALLS)]
        made = [RandomForward(kind, Draw(chain, [], results=2), number + i) for i, chain in enumerate(chains)]
        self.before, self.after = made[0], made[1]
        kinds = [chains[2], chains[3]] if self.way == "by turns" else [chains[2]]
        each = enumerate(kinds * COUNT, 10)
        self.layers = nn.ModuleList(RandomForward(kind, Draw(chain, [], results=2), number + i) for i, chain in each)
        self.laid = draw.choice((0, draw.randrange(len(LAID))))
        names = (" ".join(link.idiom.__name__ for link in chain) for chain in chains)
        self.what = f"{self.way}{', reads back' * self.reads_back}: {' | '.join(names)}"

    def forward(self, x: Tensor, y: Tensor, vector: Tensor) -> Tensor:
        x, y = self.before(x, y, vector)
        if self.reads_back and float(vector[0, 0]) > 1e6:  # so that blocks are recorded one by one
            x = -x
        for block in self.layers:
            first, second = block(x, y, vector)
            if self.way == "in place":
                x.add_(second.tanh(), alpha=0.1)
            elif self.way == "two streams":
                x, y = x + second.tanh(), y + first.tanh() * 0.1
            elif self.way == "a view":
                x = torch.cat([second.tanh(), y], 1)[:, : x.shape[1]]
            else:
                x = x + second.tanh()
        return self.after(x, y, vector)[-1]

    def inputs(self, seed: int, size: Sequence[int]) -> list[Tensor]:
        """Random ones of a size."""
        x, y, vector = self.before.inputs(seed, size)
        return [*LAID[self.laid](x, y), vector]


def _moved(model: RandomBlocks, given: Sequence[Tensor], wanted: Tensor) -> float:
    """How far rounding alone may carry the model: a comparison that it tips over, say."""
    from tools.architectures.taped import far

    found = 0.0
    for seed in range(12):
        drawn = torch.Generator().manual_seed(seed)
        noise = [torch.randn(x.shape, generator=drawn).to(x) * 3e-7 for x in given]
        found = max(found, far(model(*(x * (1 + each) for x, each in zip(given, noise, strict=True))), wanted))
    return found


def wrong(number: int, kind: str) -> Iterator[str]:
    """The model's results that rounding does not explain, and what the engine says of itself."""
    from anyshape.accel import maker, stats, tape_tier
    from anyshape.accel.call import Call, Settings
    from anyshape.accel.engine import Engine
    from anyshape.accel.key import shape_key
    from anyshape.accel.take import Taped

    from tools import captures
    from tools.architectures.taped import far
    from tools.oracles import reasons

    model, verify = RandomBlocks(kind, number), bool(number % 2)
    stats.STATS.clear()
    engine = Engine(stats.STATS.model("Blocks", "model"), passthrough=(KeyboardInterrupt,))
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(maker.KEEPER, "watch", lambda *_: None)
        if embed.has_cuda() or not draws.has_graphs(f"blocks {kind} {number}"):
            patch.setattr(tape_tier, "can_fuse", lambda device: True)
        else:  # whose stand-in replays torch's operations alone
            captures.as_on_a_gpu(patch)
        for place, size in enumerate(model.sizes):
            seed = number + 1000 * place
            wanted, given = model(*model.inputs(seed, size)), model.inputs(seed, size)
            names = dict(zip(("x", "y", "vector"), given, strict=True))
            run = lambda *_: model(*given)  # noqa: B023, E731 - called before the next turn
            taped = Taped(model, run, {}, prepare=lambda options, recorder: None, structure=0)
            call = Call(shape_key(names), names, run, weights=0, width=8, height=8, batch=1, taped=taped)
            error = far(engine(call, Settings(verify=verify)), wanted)
            if not error <= FUSED[torch.float32] and not error <= 2 * _moved(model, given, wanted):
                yield f"{kind} {number} call {place} at {size} of {model.sizes}: {error:.3g} {model.what}"
                return
    for reason in reasons():
        if model.reads_back and "came back" in reason:  # its blocks have nothing to fuse, or this draw has no kernels
            continue
        yield f"{kind} {number} {model.sizes}: {reason} {model.what}"


if __name__ == "__main__":
    if not embed.has_cuda():
        os.environ["TRITON_INTERPRET"] = "1"
    draws.run(__doc__, wrong, tuple(IDIOMS), None if embed.has_cuda() else interpreted)
