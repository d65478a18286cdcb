"""One family twice in this process: ComfyUI's own MODEL with the tiny checkpoint's weights, and a
PARALLEL_DIT whose rank is this process."""

import json
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from comfy_modules import comfy_modules
from parallel_dit.backend import protocol as client_protocol
from tiny import facts, weights_module, write_checkpoint
from versions import skip_without_class

from backend import protocol
from backend.config import ConfigError, ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.parallel import mesh
from backend.sampling.step_loop import Callbacks

with comfy_modules():
    import comfy.model_detection
    import comfy.model_patcher
    import comfy.supported_models
    from parallel_dit.backend.client.auto.model_choice import ModelChoice
    from parallel_dit.backend.config import ParallelConfig as ClientConfig
    from parallel_dit.nodes.comfy_models.registry import weightless_patcher
    from parallel_dit.nodes.host import remote_solver
    from parallel_dit.nodes.host.handle import ParallelDiT


def native_model(family: str, entries: Mapping = {}) -> comfy.model_patcher.ModelPatcher:
    """ComfyUI's MODEL of a golden family, with other ``entries`` of its unet_config."""
    told = facts(family)
    skip_without_class(told["comfy_class"])
    state = weights_module().state_dict(told["shapes"])
    # what this version detects, at the tiny widths
    config = getattr(comfy.supported_models, told["comfy_class"])(
        {**comfy.model_detection.detect_unet_config(state, ""), **told["unet_config"], **entries}
    )
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model(state, "")
    model.load_model_weights(state, "")
    return comfy.model_patcher.ModelPatcher(model.eval(), torch.device("cpu"), torch.device("cpu"))


class Rank:
    """A backend of one rank: the worker's part of a request, without a socket."""

    welcome = client_protocol.Welcome(1, "cpu", {}, [])
    config = ClientConfig()
    wait_line = ""
    step_line = ""
    is_left = False
    left_line = ""
    in_use = staticmethod(nullcontext)

    def __init__(self, checkpoint: str):
        self.engine = Engine(ParallelConfig(), mesh.single())
        self.engine.load("tiny", checkpoint, "default")
        self.requests = []
        self.models = {}  # of others, which would leave the ranks where memory lacks
        self.aside = set()  # and those of them that have left

    def sample(self, message, on_progress, should_cancel, room=None, all_ranks=False, leaves=False):
        """As a backend's own; nothing else wants the memory, so neither ``room`` nor ``all_ranks`` is
        asked, and nothing is cancelled."""
        header = json.loads(
            json.dumps({key: value for key, value in vars(message).items() if key != "tensors"})
        )
        sample = protocol.Sample(
            **header, tensors={name: tensor.cpu().clone() for name, tensor in message.tensors.items()}
        )
        self.requests.append(sample)
        tensors = {}
        try:
            self.engine.check_sample(sample)
        except (UnsupportedError, ConfigError) as error:
            raise client_protocol.RefusedError(str(error)) from None
        total = len(sample.tensors["sigmas"]) - 1
        callbacks = Callbacks(
            lambda step, x0: on_progress(client_protocol.Progress(step, total)),
            on_denoised=lambda x0: tensors.update(denoised=x0),
        )
        samples, stats = self.engine.sample(sample, callbacks)
        return client_protocol.Result(stats, {"samples": samples, **tensors})


def parallel_dit(family: str, folder, monkeypatch) -> ParallelDiT:
    """A handle whose requests go to a Rank, its ``backend``."""
    rank = Rank(str(write_checkpoint(folder / f"{family}.safetensors", family)))
    facts = rank.engine.facts("tiny")
    loaded = client_protocol.Loaded("tiny", rank.engine.models["tiny"].family.name, facts)
    monkeypatch.setattr(remote_solver, "ensure_loaded", lambda handle: (rank, loaded))
    return ParallelDiT(ClientConfig(), ModelChoice(""), loaded, weightless_patcher(loaded)), rank
