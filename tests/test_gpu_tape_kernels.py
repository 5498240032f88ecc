"""The tape's kernels on a real GPU: how they round, and that those of the first size serve all others."""

import dataclasses

import pytest
import torch

from tools import architectures

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_stats", "no_graphs_left")]

HALF = {"AuraFlow": torch.float16, "PixArtSigma": torch.float16, "SD3": torch.float16}  # the others: bfloat16
FAMILIES = (
    "Flux", "Flux2", "SD3", "Chroma", "QwenImage", "ZImage", "AuraFlow", "PixArtSigma", "HunyuanVideo", "WAN21_T2V",
    "LTXV", "GenmoMochi", "CosmosT2IPredict2",
)  # fmt: skip
VARIANTS = 20
LARGE = {3: 0, 11: 7, 19: 22}  # of these, those with four times the sides of another variant
# The share of elements that may be rounded the other way, as functions and sums differ in their last bit. Measured in
# bfloat16: 1e-5 to 4e-5. A float16 has 8 times as many steps.
DIFFERENT = {torch.bfloat16: 1e-4, torch.float16: 8e-4, torch.float32: 1e-4}
GELU = 0.03  # torch's own contracts multiply and add; measured: 1 %, and in its far tail several steps
FEW = 5  # of a kernel with few elements
FAR = 0.5  # of these, the share where a later sum cancels most of a number, so that one step of it becomes several


@pytest.fixture(scope="module")
def family(request, pack):
    """20 variants of a family, recorded and run: (variants of kernels that were new to each, how kernels round, what is
    wrong, the dtype).
    """
    from anyshape.accel import verify
    from anyshape.accel.errors import WrongResult
    from anyshape.accel.tape import kernels, structure
    from triton import knobs

    from tools.architectures import patchers
    from tools.recording import Rounding, recorded

    entry, dtype = architectures.TABLE[request.param], HALF.get(request.param, torch.bfloat16)
    if entry not in architectures.present():
        pytest.skip("this ComfyUI has no such model")
    for known in (kernels._FUNCTIONS, kernels._COMPILED, structure._KNOWN):  # or other families' kernels would serve
        known.clear()
    module = patchers.make(entry.name, dtype, "cuda").model.diffusion_model
    large = dataclasses.replace(entry, scale=4 * entry.scale)
    heard, news, wrong, rounding = [], [], [], Rounding()
    with pytest.MonkeyPatch.context() as patch:
        # a kernel that Triton finds in its cache on disk is new to this process, too
        patch.setattr(knobs.compilation, "listener", lambda src, **compilation: heard.append(str(src.name)))
        for variant in range(VARIANTS):
            size = LARGE.get(variant)
            args, named = (entry if size is None else large).inputs(variant if size is None else size, dtype, "cuda")
            heard.clear()
            call = recorded(module, args, named)
            out = call.run()
            news.append(heard[:])
            try:
                verify.compare(f"variant {variant}", out, call.out)
            except WrongResult as reason:
                wrong.append(str(reason))
            if size is not None:
                rounding.add(call)
    return news, rounding.by_source(), wrong, dtype


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_kernels_round_as_eager_does(family):
    """Each on eager's own inputs: equal to the bit, but where a function or a sum differs in its last bit."""
    _, kernels, wrong, dtype = family
    assert not wrong
    assert sum(elements for _, elements, *_ in kernels) > 300_000
    for name, elements, different, far, source in kernels:
        allowed = (GELU if "gelu_" in source else DIFFERENT[dtype]) * elements + FEW
        assert different <= allowed, f"{name}: {different} of {elements} are rounded in another way\n{source}"
        assert far <= FAR * allowed, f"{name}: {far} of {elements} are off by more than a step\n{source}"


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_the_first_size_compiles_for_all(family):
    """Sizes, batches, prompts and frames of 20 kinds; Triton's own listener says whether a variant is new."""
    news, *_ = family
    later = [(variant, names) for variant, names in enumerate(news) if variant and names]
    assert news[0]
    assert later == []
