"""Every model of the table on a tape, without a GPU: recorded at up to 20 variants, right, no kernel of one size."""

import pytest
import torch

from tools import architectures, compatibility_table
from tools.architectures import Architecture

pytestmark = pytest.mark.usefixtures("pack", "one_thread")
# Of the older ComfyUI, in the process of test_older_comfyui, one of each kind.
IS_OLDER = architectures.is_older()
ENTRIES = [
    pytest.param(entry, id=entry.name)
    for entry in (compatibility_table.looked_at_again() if IS_OLDER else architectures.present())
]
# What only ComfyUI's own forward can run, and the reason that the recorder gives.
REFUSED = {
    "HunyuanDiT": "it writes into an input or a weight",  # pads its prompt where the caller keeps it
    "HunyuanDiT1": "it writes into an input or a weight",
    "HiDream": "the size of a result depends on values",  # which tokens go to which expert
    "HiDreamO1": "the size of a result depends on values",
    # They ask a tensor on the card whether something in it is so.
    "HunyuanImage21 distilled": "the size of a result depends on values",
    "HunyuanVideo15_SR_Distilled": "the size of a result depends on values",
    "Hunyuan3Dv2_1": "the size of a result depends on values",
    "MiniMaxH3": "a value came back",
}
# How many kernels the variants after the first may add, and why. The first has one picture of one frame.
LATER: dict[str, int] = {
    # On a CPU, torch's cat and group_norm put the channels of one frame first and those of several last: 5 readers.
    "SVD_img2vid": 5, "SV3D_u": 5, "SV3D_p": 5,
    # Of one frame nobody can tell (b t) (h w) from b (t h w), nor n t from t n.
    "CosmosT2V": 1, "CosmosI2V": 1, "WAN22_S2V": 1, "WAN22_S2V motion": 1,
    # A loop over pictures: what is copied for each becomes one kernel of as many results, up to four.
    "ZImagePixelSpace": 3,
    # Several frames of a time step each: the forward repeats what it makes of them for every token, by an operation
    # that one frame's forward does not have.
    "WAN22_T2V first frame": 6,
    # A video of one frame is its reference alone; of others each frame attends to its own pose.
    "WAN_Animate2 pose": 7,
    # The prompt's sound is longer or shorter than the latent: cut or padded.
    "MiniMaxMusic3": 1,
    # Tokens are cut into windows: so many parts, and as many joined again, as a size has windows.
    "SeedVR2": 11,
    # A video of one frame is its guiding frame alone: all tokens are modulated alike, later ones in two kinds.
    "HunyuanVideoI2V guiding frame": 6,
}  # fmt: skip
LARGE = {"wan2.1": "WAN21_T2V", "hunyuan_video": "HunyuanVideo"}  # families of a dozen models and of five: the first
SOME = 8  # variants of the others of a large family
FEW = 4  # of one that is built like another
OLDER = 2  # and of those that the older ComfyUI builds, whose fused programs are not run
TOLERANCE = 1e-4  # of fused programs in float32


def check(found: dict, variants: int) -> None:
    """What must be true of a model's record."""
    name = found["name"]
    assert found["odd"] == []
    if name in REFUSED:
        assert REFUSED[name] in found["refusal"]
        return
    assert not found["refusal"]
    assert found["operations"] > 50 and found["kernels"] > 5
    assert len(found["new_kernels"]) == variants and found["new_kernels"][0] > 0
    assert sum(found["new_kernels"][1:]) <= LATER.get(name, 0), found["new_kernels"]
    assert found["unfused_error"] == 0.0
    assert found["fused_error"] is None or found["fused_error"] <= TOLERANCE


def is_relative(entry: Architecture) -> bool:
    """Whether it is one of a large family, and not its first."""
    family = entry.draw(0).config.get("image_model")
    return family in LARGE and entry.name != LARGE[family]


@pytest.mark.parametrize("entry", ENTRIES)
def test_recorded_right_and_no_kernel_of_one_size(entry: Architecture, records: dict[str, dict]):
    from dataclasses import asdict

    from tools.architectures import taped

    # A twin's fused program is another one, but not another kind of program.
    twin = architectures.is_twin(entry)
    variants = OLDER if IS_OLDER else FEW if twin else SOME if is_relative(entry) else taped.VARIANTS
    records[entry.name] = asdict(taped.study(entry, variants, run=not twin and not IS_OLDER))
    check(records[entry.name], variants)


@pytest.fixture(scope="module")
def records() -> dict[str, dict]:
    """What was found of each model, for the tests at the end of this file."""
    return {}


def test_at_least_25_are_recorded(records: dict[str, dict]):
    if len(records) < len(ENTRIES):
        pytest.skip("not every model was looked at in this run")
    recorded = [name for name, found in records.items() if not found["refusal"]]
    assert len(recorded) >= 25 and len(recorded) >= len(ENTRIES) - len(REFUSED)


def test_a_change_of_weights_needs_no_new_recording():
    from tools.architectures import taped

    studied = taped.Studied(architectures.TABLE["SD3"])
    recording = studied.record(1)
    program = recording.program(fuse=False)
    before = recording.out.clone()
    weight = studied.model.get_parameter("joint_blocks.0.x_block.attn.qkv.weight")
    with torch.inference_mode():
        weight.data += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    wanted = recording.eager()
    assert taped.far(wanted, before) > 1e-3
    assert recording.error(program, wanted) == 0.0
    weight.data = weight.data.clone()  # another place in memory
    program.bind(studied.model)
    assert recording.error(program, wanted) == 0.0


def test_table_of_models_is_current(records: dict[str, dict]):
    """The older ComfyUI's part of it is looked at in the process of test_older_comfyui."""
    if len(records) < len(ENTRIES) or not compatibility_table.is_about_this():
        pytest.skip("not every model was looked at in this run, or COMFYUI_PATH names another")
    names = [entry.name for entry in architectures.present()]
    assert compatibility_table.outdated(records.values(), names) == [], "run python -m tools.compatibility_table"
