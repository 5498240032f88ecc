"""AnyShape's engine: fused kernels and CUDA graphs for models whose sizes change.

Only ``comfy`` imports ComfyUI; everything else is plain torch.
"""
