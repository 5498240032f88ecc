"""One file a model family: how its forward is written in fused operations, and how it is attached to ComfyUI."""
