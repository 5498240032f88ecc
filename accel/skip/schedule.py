"""Which steps run every block: a fixed list, known before the run starts, so that no step waits for the GPU.

Ma, Fang and Wang 2024, "DeepCache", section 3.2 (one full step in N) and 3.3 (non-uniform 1:N). Ours places the same
number of full steps in one of two ways, each measured on a trained model (docs/performance.md).

- In a network that is shaped like a U: by a power of the step's place, dense where the features move fast, and both
  ends always full.
- In a row of blocks: evenly, from the first step on. There that was nearer than the uneven schedules that were tried.
"""

from collections.abc import Iterable

FEW_STEPS = 8  # runs as short as this leave little to win, and every step of a distilled model counts
DENSITY = 1.1  # of the power law of a U; above 1 dense early, below 1 dense late; see docs/performance.md


def full_steps(steps: Iterable[int], interval: int, density: float | None = DENSITY) -> frozenset[int]:
    """One in ``interval`` of the ``steps`` (in order), rounded up: by a power law, or evenly if ``density`` is None."""
    steps = list(steps)
    if density is None:
        return frozenset(steps[::interval])
    if len(steps) < 3:
        return frozenset(steps)
    count = max(2, -(-len(steps) // interval))
    last = len(steps) - 1
    places = [round(last * (index / (count - 1)) ** density) for index in range(count)]
    return frozenset(steps[place] for place in _distinct(places, last))


def _distinct(places: list[int], last: int) -> list[int]:
    """The places moved apart where rounding put two on one; both ends stay."""
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + 1)
    for index in reversed(range(len(places))):
        places[index] = min(places[index], last - (len(places) - 1 - index))
    return places
