"""Text encoders and VAE of a diffusers folder."""
