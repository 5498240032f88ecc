"""Compile Model: a MODEL that runs fast at every size."""

from comfy_api.latest import io

from ..accel.call import BUDGET_MB, MODES, Settings
from ..accel.comfy import entries
from ..accel.comfy.attach import compile_model
from . import badge
from .giving import Part, give, part_of
from .schema import budget_input, mode_input, model_input, model_output, schema, verify_input

TIMED = {f"time {mode}": mode for mode in ("auto", "exact")}  # what Compare queues: ComfyUI's own forwards are timed


class CompileModel(io.ComfyNode):
    """Returns a clone of the model whose forwards go through the engine."""

    @classmethod
    def define_schema(cls) -> io.Schema:  # noqa: D102
        return schema(
            node_id="AnyShapeCompileModel",
            display_name="Compile Model (AnyShape)",
            description="Speeds up sampling for any image or video model. It compiles once, in seconds, and never "
            "again for a new size, batch or prompt length. What cannot run faster runs as without this node; Shape "
            "Cache Info says why.",
            inputs=[model_input(), mode_input(), budget_input(), verify_input()],
            outputs=[model_output()],
            hidden=badge.HIDDEN,
        )

    @classmethod
    def validate_inputs(cls, mode: str | None = None) -> bool | str:
        """In the place of ComfyUI's look at the list, which lacks what *Compare* queues."""
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
    settings = Settings(mode, graph_budget_mb, verify)

    def made() -> Part:
        compiled, message = compile_model(model, settings)
        return Part(compiled, entries.of_model(compiled), message, mode != "off", entries.passed_by(compiled), model)

    return part_of(model, "Compile Model", made)


def is_mode(mode: str | None) -> bool | str:
    """Whether a prompt may have this mode, or why not; None: it comes from another node, and is not known yet."""
    if mode is None or mode in (*MODES, *TIMED):
        return True
    return f"{mode!r} is not in the list; choose one of {', '.join(MODES)}"


def timed(model: io.Model.Type, mode: str) -> io.Model.Type:
    """Returns a model that runs and times ComfyUI's own forwards, compiled ControlNets' too. mode: one of ``TIMED``."""
    return compile_model(model, Settings(TIMED[mode], timed=True))[0]
