"""What a family makes of a prompt and a latent's size alone, made once a request."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

Made = TypeVar("Made")


class RequestArguments(dict[str, Tensor]):
    """The model arguments of one prompt and some samples, the same object at every step of a request.

    cached: what ``once`` has made for them.
    """

    def __init__(self, arguments: Mapping[str, Tensor]):
        super().__init__(arguments)
        self.cached: dict[str, Any] = {}

    def at_step(self, arguments: Mapping[str, Tensor]) -> "RequestArguments":
        """Return these arguments and those of one step, with what was made of these."""
        found = RequestArguments({**self, **arguments})
        found.cached = self.cached
        return found


def distilled_guidance(config: Mapping[str, Any], cond: Mapping[str, Tensor], batch: int) -> Tensor | None:
    """Return the guidance (batch,) of a guidance-distilled model; None for others, and where the request has
    none (FluxDisableGuidance)."""
    if not config["guidance_embeds"] or "guidance" not in cond:
        return None
    return cond["guidance"].reshape(-1).expand(batch)


def once(cond: Mapping[str, Tensor], name: str, make: Callable[[], Made]) -> Made:
    """Return what ``make`` returns, computed at the first step of a request alone.

    For what depends on neither the latent's values nor the noise level, and would wait for the device or keep
    the host busy: positions, indices, whether a mask hides anything. ``cond``: the arguments that
    ModelIO.arguments was given; with a plain dictionary it is made anew.
    """
    if not isinstance(cond, RequestArguments):
        return make()
    if name not in cond.cached:
        cond.cached[name] = make()
    return cond.cached[name]
