"""Which call of the model is under way: one frozen value, made by the step loop and handed down."""

from dataclasses import dataclass

from .sequence import Span


@dataclass(frozen=True)
class StepContext:
    """One micro-batch of one evaluation: a prompt of some samples and latent tokens.

    evaluation: index of the model call in the request's plan. sample_span: of this replica's batch. image:
    latent tokens of a patch; None for the whole latent. with_text: text and reference tokens come too.
    """

    prompt: str
    evaluation: int
    sample_span: Span
    image: Span | None = None
    with_text: bool = True

    @property
    def samples(self) -> slice:
        return self.sample_span.indices

    @property
    def keys(self) -> list[tuple[str, int]]:
        return [(self.prompt, item) for item in range(self.sample_span.lo, self.sample_span.hi)]

    def regroups(self, prompt: str, span: Span) -> bool:
        """Return whether some of the samples ``span`` of ``prompt`` are here among others than there."""
        return prompt == self.prompt and span != self.sample_span and span.overlaps(self.sample_span)
