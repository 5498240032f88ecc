"""Connects ComfyUI to the engine: a MODEL, a VAE or a CONTROL_NET becomes calls. No model is known by name."""
