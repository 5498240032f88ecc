"""Kernels' launchers are loaded one at a time: Python has one module of their name."""

import time
from types import SimpleNamespace

from tools import embed
from tools.driving import in_threads

embed.bare_pack()

from anyshape.accel.kernels import launchers  # noqa: E402 - the package exists from the line above on


class Compiled:
    """As Triton's: loading puts a module into the place that all have in common, and looks there again."""

    metadata = None
    shared = SimpleNamespace(launch=None)

    def __init__(self, number: int, dtype: str = "fp32") -> None:
        self.number, self.launch = number, None
        self.src = SimpleNamespace(signature={"x": f"*{dtype}"} | {f"n{each}": "i32" for each in range(number % 2)})

    @property
    def run(self) -> int:
        """Its own launcher, if nobody else loads one meanwhile."""
        self.shared.launch = self.number
        time.sleep(0.002)
        self.launch = self.shared.launch
        return self.launch


def test_each_kernel_has_its_own(monkeypatch) -> None:
    built = []
    monkeypatch.setattr(launchers, "_building", lambda: lambda launcher, src, metadata: built.append(launcher))
    kernels = [Compiled(number) for number in range(16)]
    assert in_threads(launchers.load, kernels) == kernels
    assert [kernel.launch for kernel in kernels] == list(range(16))
    assert len(built) == 16  # side by side, before


def test_threads_build_a_launcher_once(monkeypatch) -> None:
    """It depends on the kinds of arguments, for which all pointers are alike. Others are built meanwhile."""
    active, seen = [], []

    def build(launcher, src, metadata):
        active.append(len(src.signature))
        time.sleep(0.005)
        seen.append(tuple(active))
        active.remove(len(src.signature))

    monkeypatch.setattr(launchers, "_building", lambda: build)
    in_threads(launchers.load, [Compiled(number, dtype) for number in range(6) for dtype in ("fp16", "bf16")])
    assert len(seen) == 12 and all(len(set(each)) == len(each) for each in seen)
    assert any(len(each) == 2 for each in seen)


def test_where_building_alone_does_not_work_it_is_loaded_all_the_same(monkeypatch) -> None:
    """As with a newer Triton, whose modules have more in them."""

    def build(launcher, src, metadata):
        return launcher.signature

    monkeypatch.setattr(launchers, "_building", lambda: build)
    assert launchers.load(Compiled(3)).launch == 3


def test_a_launcher_is_built_as_triton_builds_it(monkeypatch) -> None:
    """All but its end. Of another Triton nothing is known, and it is built where it is loaded."""
    from triton.backends.nvidia import driver

    launchers._building.cache_clear()
    try:
        build = launchers._building()
        assert build.__code__ is driver.CudaLauncher.__init__.__code__
        assert build.__globals__["compile_module_from_src"].__code__ is driver.compile_module_from_src.__code__
        assert build.__globals__["compile_module_from_src"] is not driver.compile_module_from_src
        launchers._building.cache_clear()
        monkeypatch.delattr(driver, "CudaLauncher")
        assert launchers._building() is None
    finally:
        launchers._building.cache_clear()
