"""AnyShape's engine: fused kernels and CUDA graphs for models whose sizes change.

Only ``families`` imports ComfyUI; everything else is plain torch.
"""
