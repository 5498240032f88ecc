"""How models meet ComfyUI: a MODEL, a VAE or a CONTROL_NET as calls of the engine. No model is known by name."""
