"""AnyShape's engine: fused kernels, symbolic-size regions and CUDA graphs for models whose sizes change.

Only ``families`` imports ComfyUI; everything else is plain torch.
"""
