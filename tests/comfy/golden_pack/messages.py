"""TEST ONLY: what the pack sends to its ranks."""

import json
import sys
from typing import Any


def framing_of_the_pack() -> Any:
    """Its module, under whatever name ComfyUI has imported the pack."""
    (module,) = [
        found for name, found in list(sys.modules.items()) if name.endswith(".backend.protocol.framing")
    ]
    return module


class TestSentMessages:
    """ui text: JSON with the kinds of messages that the pack has sent since this node last ran."""

    RETURN_TYPES = ()
    FUNCTION = "run"
    CATEGORY = "test"
    OUTPUT_NODE = True
    #: Kinds of messages, from the first run of this node on.
    sent: list[str] = []
    notes = False

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",)}}

    def run(self, samples):
        cls = type(self)
        if not cls.notes:
            cls._begin()
        told, cls.sent = cls.sent, []
        return {"ui": {"text": [json.dumps(told)]}}

    @classmethod
    def _begin(cls):
        framing = framing_of_the_pack()
        send = framing.send

        def noting(sock, message):
            cls.sent.append(type(message).__name__)
            send(sock, message)

        framing.send = noting
        cls.notes = True
