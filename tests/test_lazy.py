"""A name that another version of ComfyUI has renamed: the node that needs it says so, and the rest of the pack works.

In a process of its own, because here every module has been imported.
"""

import json
import os
import subprocess
import sys

from tools.paths import ROOT

SCRIPT = """
import json, torch
from tools import embed
embed.use_comfyui({"cpu": True})
import comfy.controlnet, comfy.sd
from bench import models
from tools import driving

HOLE = comfy.controlnet, "ControlLora"
patcher = models.unet("sd15", torch.float32, **driving.SMALL_UNET)
vae = models.vae(torch.float32, ch=32, num_res_blocks=1)
control = models.controlnet("sd15", torch.float32, **driving.SMALL_UNET)
own = getattr(*HOLE)
delattr(*HOLE)

pack = embed.load_pack()
from anyshape.accel.call import Settings
from anyshape.accel.comfy import attach, lazy, skipping
from anyshape.accel.skip.settings import SkipSettings
from anyshape.accel.stats import snapshot

def messages():
    fast, model = attach.compile_model(patcher, Settings())
    skip, skipped = skipping.skip_blocks(patcher, SkipSettings(), print)
    made = {"skip": (skip, skipped)}
    made |= {"vae": lazy.compile_vae(vae, True), "controlnet": lazy.compile_controlnet(control, True)}
    assert any(fast.wrappers.values()) and model == ""  # recorded
    plain = {
        "skip": not any(skip.wrappers.values()),
        "vae": made["vae"][0] is vae, "controlnet": made["controlnet"][0] is control,
    }
    return {name: (message, plain[name]) for name, (_, message) in made.items()}

found = [messages()]
setattr(*HOLE, own)
found.append(messages())
nodes = sorted(node.define_schema().node_id for node in pack.nodes.NODES)
print("RESULT", json.dumps([nodes, found, [f["reason"] for f in snapshot()["fallbacks"]]]))
"""
# What is missing, with the hole and without: node -> the name in its message.
MISSING = [{"controlnet": "ControlLora"}, {}]


def test_one_renamed_name_costs_what_needs_it():
    places = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = [sys.executable, "-c", SCRIPT]
    environment = os.environ | {"PYTHONPATH": places}
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    nodes, found, reasons = json.loads(done.stdout.split("RESULT", 1)[1])
    assert len(nodes) == 7 and "AnyShapeShapeCacheInfo" in nodes
    for messages, missing in zip(found, MISSING, strict=True):
        for node, (message, plain) in messages.items():
            assert plain == (node in missing), (node, message)
            assert missing.get(node, "") in message and bool(message) == plain
            assert message == "" or message in reasons
