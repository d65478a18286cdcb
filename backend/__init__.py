"""The parallel denoising backend: process groups, model shards and the step loop. Never imports comfy."""
