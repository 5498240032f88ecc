"""The nodes that users drag: a schema and a few lines each; the work is in ``accel``."""

from .accelerate import Accelerate
from .compile_controlnet import CompileControlNet
from .compile_model import CompileModel
from .compile_vae import CompileVAE
from .shape_cache_info import ShapeCacheInfo
from .skip_blocks import SkipBlocks
from .warm_up import WarmUp

NODES = [Accelerate, CompileModel, CompileVAE, CompileControlNet, SkipBlocks, WarmUp, ShapeCacheInfo]
