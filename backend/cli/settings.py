"""The option --config: a configuration of ranks or of requests, as JSON. Imports no models: the ranks of the
command ``start`` do, and it need not wait for that itself."""

import json
from collections.abc import Sequence
from dataclasses import fields

import torch

from ..config import AXES, PER_REQUEST, ConfigError, ParallelConfig
from ..planner.auto_config import AutoConfig, config_of
from ..protocol import Welcome

FIELDS = tuple(each.name for each in fields(ParallelConfig))
#: Why --config has fewer entries with --address.
THERE = ", since the ranks at --address run already"
Plan = ParallelConfig | AutoConfig


def read_config(text: str) -> ParallelConfig:
    """Return the ParallelConfig of a JSON object of its fields. Raises ConfigError."""
    entries = read_entries(text, FIELDS)
    if type(entries.get("gpus")) is int:  # a number of GPUs, as auto has it
        like = f'{{"ulysses_degree": {entries["gpus"]}}}'
        raise ConfigError(
            f'gpus is {entries["gpus"]}; start takes degrees, like {like}, or gpus as a list, like "0,2".'
        )
    return ParallelConfig(**entries).validate()


def read_settings(text: str, welcome: Welcome) -> ParallelConfig:
    """Return the configuration of requests to a running backend, whose degrees its ``welcome`` has. Raises
    ConfigError for other entries than PER_REQUEST, and for values that do not go with the degrees."""
    found = read_entries(text, PER_REQUEST, THERE)
    degrees = {name: welcome.degrees[axis] for axis, name in AXES.items()}
    return ParallelConfig(**degrees, **welcome.settings, **found).validate()


def read_plan(text: str) -> Plan:
    """Return the configuration of a JSON object of Parallel Config's inputs: degrees, or what leaves them to
    auto. Raises ConfigError."""
    found = read_entries(text, ("method", *FIELDS))
    if type(found.get("gpus")) is int:  # as the node's is written
        found["gpus"] = str(found["gpus"])
    return config_of(torch.cuda.device_count(), **found)


def read_entries(text: str, names: Sequence[str], why: str = "") -> dict:
    """Return a JSON object with entries of these ``names`` alone. Raises ConfigError."""
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--config is no JSON ({error}); write it like '{{\"ulysses_degree\": 2}}'."
        ) from error
    unknown = [name for name in entries if name not in names] if isinstance(entries, dict) else [text]
    if unknown:
        raise ConfigError(f"--config has {unknown[0]!r:.80}; its entries are {', '.join(names)}{why}.")
    return entries
