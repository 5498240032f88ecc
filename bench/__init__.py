"""Benchmarks on the real ComfyUI with full-size models and random weights: for speed and memory, never for quality."""
