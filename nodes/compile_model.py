"""Compile Model: a MODEL that runs fast at every size."""

from comfy_api.latest import io

from ..accel.call import BUDGET_MB, MAX_BUDGET_MB, MODES, Settings
from ..accel.comfy import entries
from ..accel.comfy.attach import compile_model
from . import badge
from .giving import Part, give, part_of
from .messages import VERIFY
from .schema import schema

FORMER = ("kernels", "regions")  # modes of versions before the tape; saved workflows still name them
TIMED = {f"time {mode}": mode for mode in ("auto", "exact")}  # what Compare queues: ComfyUI's own forwards are timed


def budget_input() -> io.Int.Input:
    """The input ``graph_budget_mb``."""
    return io.Int.Input(
        "graph_budget_mb",
        default=BUDGET_MB,
        min=0,
        max=MAX_BUDGET_MB,
        step=64,
        tooltip="How much GPU memory CUDA graphs may take, in MB. They make small images much faster. About 1.5 GB "
        "is enough for all SDXL sizes. When the memory is used up, the least recently used sizes lose their graphs. "
        "0: no graphs.",
    )


class CompileModel(io.ComfyNode):
    """Returns a clone of the model whose forwards go through the engine."""

    @classmethod
    def define_schema(cls) -> io.Schema:  # noqa: D102
        return schema(
            node_id="AnyShapeCompileModel",
            display_name="Compile Model (AnyShape)",
            category="AnyShape",
            description="Speeds up sampling for any image or video model. It compiles once, in seconds, and never "
            "again for a new size, batch or prompt length. What cannot run faster runs as without this node; Shape "
            "Cache Info says why.",
            inputs=[
                io.Model.Input("model", tooltip="The model to speed up. LoRA nodes may come before or after."),
                io.Combo.Input(
                    "mode",
                    options=list(MODES),
                    default="auto",
                    tooltip="auto: the fastest. Small operations are fused into fewer, faster ones. exact: ComfyUI's "
                    "own operations, in a CUDA graph where that pays. The picture is bit-equal to ComfyUI's. off: "
                    "exactly as without this node.",
                ),
                budget_input(),
                io.Boolean.Input("verify", default=True, optional=True, tooltip=VERIFY),
            ],
            outputs=[
                io.Model.Output(
                    tooltip="The same model, faster. To get the original back, bypass (Ctrl+B) or delete this node."
                )
            ],
            hidden=badge.HIDDEN,
        )

    @classmethod
    def validate_inputs(cls, mode: str | None = None) -> bool | str:
        """Replaces ComfyUI's own check of the list, which would refuse a saved workflow with a former mode."""
        return is_mode(mode)

    @classmethod
    def execute(  # noqa: D102
        cls, model: io.Model.Type, mode: str = "auto", graph_budget_mb: int = BUDGET_MB, verify: bool = True
    ) -> io.NodeOutput:
        settings = {"mode": mode, "graph_budget_mb": graph_budget_mb, "verify": verify}
        if mode in TIMED:
            return io.NodeOutput(timed(model, mode))
        return give(cls, model_part(model, **settings), **settings)


def model_part(model: io.Model.Type, mode: str, graph_budget_mb: int, verify: bool) -> Part:
    """Compiles a MODEL, as the node does."""
    mode, note = _current(mode)
    settings = Settings(mode, graph_budget_mb, verify)

    def made() -> Part:
        compiled, message = compile_model(model, settings)
        message = "\n".join(text for text in (note, message) if text)
        return Part(compiled, entries.of_model(compiled), message, mode != "off", entries.passed_by(compiled), model)

    return part_of(model, "Compile Model", made)


def _current(mode: str) -> tuple[str, str]:
    """(the mode that stands for ``mode`` today, what the user should know)."""
    if mode not in FORMER:
        return mode, ""
    return "auto", f"mode {mode!r} comes from an earlier version and now means auto: choose one of {', '.join(MODES)}"


def is_mode(mode: str | None) -> bool | str:
    """Whether a prompt may have this mode, or why not; None: it comes from another node, and is not known yet."""
    if mode is None or mode in (*MODES, *FORMER, *TIMED):
        return True
    return f"{mode!r} is not in the list; choose one of {', '.join(MODES)}"


def timed(model: io.Model.Type, mode: str) -> io.Model.Type:
    """Returns a model that runs and times ComfyUI's own forwards, compiled ControlNets' too. mode: one of ``TIMED``."""
    return compile_model(model, Settings(TIMED[mode], timed=True))[0]
