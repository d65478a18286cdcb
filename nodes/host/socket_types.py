"""Types of the pack's own sockets in a graph."""

from comfy_api.latest import io

ParallelConfigType = io.Custom("PARALLEL_CONFIG")
ParallelDiTType = io.Custom("PARALLEL_DIT")
