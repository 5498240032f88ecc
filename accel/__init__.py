"""The engine of AnyShape: fused kernels and CUDA graphs for models whose input sizes change.

Only ``comfy`` imports ComfyUI; everything else is plain torch.
"""
