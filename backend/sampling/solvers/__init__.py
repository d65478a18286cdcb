"""Solvers by family of methods; solver_registry.py names them. Each is a generator over a patch's tokens.

A solver yields ``(x, sigma, step)`` where it needs the model, is sent the denoised prediction (those in
solver_names.NEEDS_NEGATIVE: the pair of the guided and the negative prompt's prediction), and returns the
final x. ``sigma`` need not be in the schedule (half steps); ``step`` is the step that it belongs to. The
maths on x is elementwise and without fused operations, so that tokens give the same bits whichever patch they
are in. Formulas, defaults and their order are ComfyUI's (comfy/k_diffusion, comfy/extra_samplers), so that
the same seed gives the same latent; coefficients are 0-d float32 tensors as there, since several cancel and
rounding is part of the answer.
"""
