"""How much modulation is computed ahead at once. Standard library only."""

#: Bytes of modulation that the stage with most of it computes ahead at once.
AHEAD = 256 * 2**20


def embeddings_ahead(width: int, itemsize: int) -> int:
    """Return how many embeddings are computed at once, if the modulation of one has ``width`` numbers."""
    return max(1, AHEAD // max(1, width * itemsize))


def evaluations_ahead(width: int, itemsize: int, embeddings: int) -> int:
    """Return for how many evaluations, of so many different ``embeddings`` each, that suffices."""
    return max(1, embeddings_ahead(width, itemsize) // embeddings)


def counted_embeddings(prompts: int, samples: int, shared: int, replicas: int) -> int:
    """Count the embeddings of an evaluation by which a chunk is measured, where samples have one prompt. They
    are those that differ, or where ``replicas`` gather weights together all of the one with most ``samples``
    (LayerCache._at_once). ``shared``: as ModelShape.shared_embeddings.

    Each prompt counts as different. Where embeddings are of the timestep alone (CogVideoX, HunyuanVideo 1.5,
    HunyuanImage 2.1, Lumina 2, Qwen-Image), a chunk of one replica has up to as many times the evaluations.
    """
    if replicas > 1:
        return prompts * (shared or samples)
    return shared or prompts
