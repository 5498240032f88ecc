"""The tape: records a forward, rewrites it and runs it again. No model is known here, and ComfyUI is not imported.

``record`` writes a forward down as operations on values. ``plan`` says which of them become one kernel and which stay
calls; ``codegen`` and ``lower`` write kernels whose sizes are arguments. ``program`` runs the steps on other inputs.
"""
