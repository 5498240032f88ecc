"""The contract of the nodes, as the real server tells it to the page: inputs, outputs, tooltips, ids."""

import pytest

from tools.comfy_server import ComfyServer

# The contract: node id -> display name, inputs (type or choices, default, minimum) in order, outputs.
MODES = ["auto", "exact", "off"]
DEPTHS = ["auto", *(str(depth) for depth in range(11))]
CONTRACT = {
    "AnyShapeAccelerate": (
        "Accelerate (AnyShape)",
        {
            "model": ("MODEL", None, None),
            "mode": (MODES, "auto", None),
            "graph_budget_mb": ("INT", 2048, 0),
            "verify": ("BOOLEAN", True, None),
            "vae": ("VAE", None, None),
            "control_net": ("CONTROL_NET", None, None),
        },
        {"MODEL": "MODEL", "VAE": "VAE", "CONTROL_NET": "CONTROL_NET"},
    ),
    "AnyShapeCompileModel": (
        "Compile Model (AnyShape)",
        {
            "model": ("MODEL", None, None),
            "mode": (MODES, "auto", None),
            "graph_budget_mb": ("INT", 2048, 0),
            "verify": ("BOOLEAN", True, None),
        },
        {"MODEL": "MODEL"},
    ),
    "AnyShapeCompileVAE": (
        "Compile VAE (AnyShape)",
        {"vae": ("VAE", None, None), "enabled": ("BOOLEAN", True, None), "verify": ("BOOLEAN", True, None)},
        {"VAE": "VAE"},
    ),
    "AnyShapeCompileControlNet": (
        "Compile ControlNet (AnyShape)",
        {
            "control_net": ("CONTROL_NET", None, None),
            "enabled": ("BOOLEAN", True, None),
            "verify": ("BOOLEAN", True, None),
        },
        {"CONTROL_NET": "CONTROL_NET"},
    ),
    "AnyShapeSkipBlocks": (
        "Skip Blocks (DeepCache)",
        {
            "model": ("MODEL", None, None),
            "interval": ("INT", 3, 1),
            "depth": (DEPTHS, "auto", None),
            "start_percent": ("FLOAT", 0.0, 0.0),
            "end_percent": ("FLOAT", 1.0, 0.0),
            "forecast": (["order1", "off"], "order1", None),
            "preset": (["custom", "safe", "balanced", "fast"], "custom", None),
        },
        {"MODEL": "MODEL"},
    ),
    "AnyShapeWarmUp": (
        "Warm Up Sizes (AnyShape)",
        {
            "model": ("MODEL", None, None),
            "shapes": ("STRING", "1024x1024", None),
            "vae": ("VAE", None, None),
            "positive": ("CONDITIONING", None, None),
            "negative": ("CONDITIONING", None, None),
            "cfg": (["auto", "on", "off", "both"], "auto", None),
            "preset": (["none", "SDXL", "portrait and landscape", "SD1.5", "sizes of the last session"], "none", None),
            "measure": ("BOOLEAN", False, None),
        },
        {"MODEL": "MODEL", "VAE": "VAE", "report": "STRING"},
    ),
    "AnyShapeShapeCacheInfo": (
        "Shape Cache Info (AnyShape)",
        {"after": ("*", None, None)},
        {"report": "STRING", "stats": "STRING", "chart": "IMAGE"},
    ),
}


@pytest.fixture(scope="module")
def described(server: ComfyServer) -> dict:
    return {name: server.get(f"/object_info/{name}").json()[name] for name in CONTRACT}


def as_contract(node: dict) -> tuple:
    """A node of /object_info in the form of CONTRACT."""
    inputs = {}
    for name, (kind, *rest) in {**node["input"].get("required", {}), **node["input"].get("optional", {})}.items():
        options = rest[0] if rest else {}
        kind = options.get("options", kind) if kind == "COMBO" else kind
        inputs[name] = (kind, options.get("default"), options.get("min"))
    return node["display_name"], inputs, dict(zip(node["output_name"], node["output"], strict=True))


@pytest.mark.parametrize("node_id", CONTRACT)
def test_schema(described, node_id) -> None:
    node = described[node_id]
    assert as_contract(node) == CONTRACT[node_id]
    assert list(as_contract(node)[1]) == list(CONTRACT[node_id][1])
    assert node["category"] == "AnyShape" and not node["experimental"] and not node["deprecated"]


def test_only_the_info_node_is_an_end(described) -> None:
    assert {name: described[name]["output_node"] for name in CONTRACT} == {
        "AnyShapeAccelerate": False,
        "AnyShapeCompileModel": False, "AnyShapeCompileVAE": False, "AnyShapeCompileControlNet": False,
        "AnyShapeSkipBlocks": False, "AnyShapeWarmUp": False, "AnyShapeShapeCacheInfo": True,
    }  # fmt: skip
    assert set(described["AnyShapeShapeCacheInfo"]["input"].get("required", {})) == set()


def test_tooltips_everywhere(pack) -> None:
    """On every input and every output, long enough to say something."""
    for each in pack.nodes.NODES:
        schema = each.define_schema()
        for slot in [*schema.inputs, *schema.outputs]:
            assert slot.tooltip and len(slot.tooltip) > 10, (schema.node_id, slot)
        assert len(schema.description) > 40


def test_words_that_people_type_are_in_the_schema_where_it_knows_them(pack) -> None:
    for each in pack.nodes.NODES:
        schema = each.define_schema()
        assert len(getattr(schema, "search_aliases", ["not", "known", "here"])) >= 3


def test_the_ids_are_the_packs_own(pack) -> None:
    """Other packs have a CompileModel too, and the last one loaded wins."""
    assert all(node.define_schema().node_id.startswith("AnyShape") for node in pack.nodes.NODES)
