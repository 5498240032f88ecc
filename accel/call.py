"""What an engine gets: one forward, and what the user chose for its model."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from . import graphs
from .key import ShapeKey
from .outputs import Output
from .take import Taped
from .tape.values import Weight
from .times import Begun

MODES = ("auto", "exact", "off")
BUDGET_MB, MAX_BUDGET_MB = 2048, 1 << 20  # for graphs: unless the user says otherwise, and at most


@dataclass(frozen=True)
class Settings:
    """What the user chose on the node. Raises ValueError naming the input, the value and the accepted ones."""

    mode: str = "auto"
    graph_budget_mb: int = BUDGET_MB  # 0: no graphs
    has_budget: bool = True  # whether the user has a node that the budget could be raised on
    verify: bool = True  # compare each new shape's first result with eager
    timed: bool = False  # only ComfyUI's own forwards run, and how long they take is noted

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}; choose one of {', '.join(MODES)}")
        if not 0 <= self.graph_budget_mb <= MAX_BUDGET_MB:
            raise ValueError(
                f"graph_budget_mb is {self.graph_budget_mb}; give 0 (no graphs) to {MAX_BUDGET_MB}, in megabytes"
            )

    @property
    def graph_budget_bytes(self) -> int:
        """The budget in bytes."""
        return self.graph_budget_mb * graphs.MIB


@dataclass(frozen=True)
class Call:
    """One forward. Valid for this call only, because it holds the caller's tensors."""

    key: ShapeKey
    inputs: dict[str, Tensor]  # everything that may differ from call to call
    eager: Callable[[], Output]  # on ComfyUI's own layers
    weights: int  # weights.WeightWatch.fingerprint, now
    width: int  # image pixels
    height: int
    batch: int  # images per prompt
    frames: int = 1
    pieces: int = 1  # of a video, that a VAE makes one after another: each of the first few takes other operations
    taped: Taped | None = None  # how to record it; None where it cannot be
    obstacle: str = ""  # why only eager is right; "" if what was recorded is
    begun: Begun | None = None  # when our looks at it began; None: with the engine
    afresh: "Callable[[], Call | None]" = lambda: None  # the same call, with another look at the model; None: none pays

    @property
    def tape_key(self) -> ShapeKey:
        """That by which its recording is found. A program that fetches weights is another one."""
        if self.taped is None or self.taped.stream is None:
            return self.key
        return replace(self.key, structure=(*self.key.structure, ("weights", "fetched")))

    def own(self, twice: bool) -> Output:
        """ComfyUI's own forward. twice: it may run twice; then its features are noted, where steps are skipped."""
        skipping = self.taped.skipping if twice else None
        return self.eager() if skipping is None or skipping.watched is None else skipping.watched()

    def laid_out(self, wanted: frozenset[Weight]) -> "Call":
        """The call, with these weights of convolutions in channels_last; without any, all as ComfyUI has them."""
        weights = self.taped.lay_out(wanted, self.weights)
        return self if weights == self.weights else replace(self, weights=weights)
