"""A limit stands in one file; who needs it elsewhere imports it."""

import ast
from collections import defaultdict

import pytest
from source_files import SOURCES, assigned

from backend.client.auto import planning
from backend.hardware import device_memory
from backend.loading import compute_dtype
from backend.loading.lora import adapters, lora_file_bytes
from backend.parallel import block_cost, mesh, stage_split
from backend.planner.machine import RequestEstimate
from backend.protocol import heartbeats, load_choices
from backend.quantization import kernels
from backend.rank_plan import RequestSize

#: Constants that several processes or rooms need -> the one file that gives each its value.
OWNERS = {
    "HELLO_SECONDS": "backend.protocol.handshake",
    "IMAGE_TOKENS, TEXT_TOKENS": "backend.parallel.stage_split",
    "MATMULS": "backend.protocol.load_choices",
    "MAX_COLLECTIVE_SECONDS": "backend.protocol.heartbeats",
    "MAX_HELLO": "backend.protocol.handshake",
    "WEIGHT_DTYPES": "backend.protocol.load_choices",
    "HOST_SHARE": "backend.hardware.device_memory",
    "MAX_FACTORS": "backend.loading.lora.lora_file_bytes",
    "MAX_HEADER_BYTES": "backend.loading.files.regular_files",
}


def owners() -> dict[str, set[tuple[str, str]]]:
    """Public constant -> the files that assign it, with what they assign."""
    found = defaultdict(set)
    for module, path in SOURCES.items():
        for name, value in assigned(path).items():
            found[name.strip("()")].add((module, ast.unparse(value)))
    return found


@pytest.mark.parametrize("name", OWNERS)
def test_one_file_gives_it_its_value(name):
    assert {module for module, _ in owners()[name]} == {OWNERS[name]}


def test_no_limit_is_copied():
    copied = {
        name: files
        for name, files in owners().items()
        if name.startswith(("MAX_", "MIN_")) and len({value for _, value in files}) < len(files)
    }
    assert not copied


def test_what_copies_were_of_are_the_same_objects():
    assert adapters.matrix is lora_file_bytes.matrix
    assert planning.HOST_SHARE is device_memory.HOST_SHARE
    assert ("default", *compute_dtype.NAMED) == load_choices.WEIGHT_DTYPES
    assert (kernels.AUTO, kernels.WEIGHT_ONLY, kernels.NATIVE) == load_choices.MATMULS
    assert mesh.TIMEOUT.total_seconds() == heartbeats.MAX_COLLECTIVE_SECONDS
    typical = stage_split.IMAGE_TOKENS, stage_split.TEXT_TOKENS
    assert (block_cost.IMAGE_TOKENS, block_cost.TEXT_TOKENS) == typical
    for request in (RequestEstimate(), RequestSize()):
        assert (request.image_tokens, request.text_tokens) == typical
