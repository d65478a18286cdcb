"""What a family makes of a prompt and a latent's size alone, made once a request."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from torch import Tensor

Made = TypeVar("Made")


class RequestArguments(dict[str, Tensor]):
    """The model arguments of one prompt and some samples, the same object at every step of a request.

    whole: those of all samples of this replica, of which these are ``samples``. cached: what ``once`` has
    made for them. shared: what ``once_a_request`` has made.
    """

    def __init__(
        self,
        arguments: Mapping[str, Tensor],
        whole: Mapping[str, Tensor],
        samples: slice,
        shared: dict[Hashable, Any],
    ):
        super().__init__(arguments)
        self.whole = whole
        self.samples = samples
        self.cached: dict[str, Any] = {}
        self.shared = shared

    def at_step(self, arguments: Mapping[str, Tensor]) -> "RequestArguments":
        """Return these arguments and those of one step, with what was made of these."""
        of_step = RequestArguments({**self, **arguments}, self.whole, self.samples, self.shared)
        of_step.cached = self.cached
        return of_step


def distilled_guidance(config: Mapping[str, Any], cond: Mapping[str, Tensor], batch: int) -> Tensor | None:
    """Return the guidance (batch,) of a guidance-distilled model. None for others, and where the request has
    none (FluxDisableGuidance)."""
    if not config["guidance_embeds"] or "guidance" not in cond:
        return None
    return cond["guidance"].reshape(-1).expand(batch)


def once(cond: Mapping[str, Tensor], name: str, make: Callable[..., Made], *arguments: Any) -> Made:
    """Return what ``make`` returns of these ``arguments``, computed at the first step of a request alone.

    For what depends on neither the latent's values nor the noise level, and would wait for the device or keep
    the host busy: positions, indices, whether a mask hides anything. ``arguments`` are made at every step.
    ``cond``: what ModelIO.arguments was given; with a plain dictionary it is made anew.
    """
    if not isinstance(cond, RequestArguments):
        return make(*arguments)
    if name not in cond.cached:
        cond.cached[name] = make(*arguments)
    return cond.cached[name]


def once_a_request(
    cond: Mapping[str, Tensor], key: Hashable, make: Callable[..., Made], *arguments: Any
) -> Made:
    """Return what ``make`` returns, computed once for all prompts and samples of a request that have ``key``:
    for what is large. As ``once`` otherwise."""
    if not isinstance(cond, RequestArguments):
        return make(*arguments)
    if key not in cond.shared:
        cond.shared[key] = make(*arguments)
    return cond.shared[key]


def of_all_samples(cond: Mapping[str, Tensor], name: str) -> tuple[Tensor | None, slice]:
    """Return the argument ``name`` of all samples of this replica, and which of them ``cond`` is for."""
    if not isinstance(cond, RequestArguments):
        return cond.get(name), slice(None)
    return cond.whole.get(name), cond.samples
