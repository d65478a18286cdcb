"""API graphs for a real ComfyUI, node by node."""

import json
from dataclasses import dataclass, field

SAMPLER = {"seed": 42, "steps": 3, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}


@dataclass
class Graph:
    """An API graph under construction; links are [node, output]."""

    nodes: dict = field(default_factory=dict)

    def add(self, class_type: str, **inputs) -> str:
        self.nodes[str(len(self.nodes))] = {"class_type": class_type, "inputs": inputs}
        return str(len(self.nodes) - 1)

    def one(self, class_type: str, **inputs) -> list:
        return [self.add(class_type, **inputs), 0]

    def three(self, class_type: str, **inputs) -> tuple[list, list, list]:
        """Positive, negative and latent of a conditioning node."""
        node = self.add(class_type, **inputs)
        return [node, 0], [node, 1], [node, 2]

    def image(self, width=128, height=104, frames=1, seed=1):
        return self.one("TestImage", width=width, height=height, frames=frames, seed=seed)

    def vae(self, channels=16, spatial=8, temporal=4):
        return self.one("TestVAE", channels=channels, spatial=spatial, temporal=temporal)

    def latent(self, *shape, seed=1, empty=False):
        return self.one("TestLatent", shape=json.dumps(shape), seed=seed, empty=empty)

    def features(self, rows=25, width=1280, seed=3):
        return self.one("TestClipVision", rows=rows, width=width, seed=seed)
