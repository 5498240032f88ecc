"""Fixtures of tests about quantised weights.

pytest_plugins = ("tools.quantised_fixtures",)       # in a file of tests
"""

from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def quantised(pack: ModuleType) -> ModuleType:
    """The maker of models with such weights, ``tools.architectures.quantised``."""
    quant_ops = pytest.importorskip("comfy.quant_ops")
    if "int8_tensorwise" not in getattr(quant_ops, "QUANT_ALGOS", {}):
        pytest.skip("this ComfyUI has no such weights")
    from tools.architectures import quantised

    return quantised
