"""How models meet ComfyUI: any MODEL by being recorded, and the families whose forwards are written by hand."""
