"""Computes on a device that may be nearly full, and on the host what finds no room there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..hardware.device_memory import is_out_of_memory

Result = TypeVar("Result")


@dataclass
class DeviceOrHost:
    """A rank's ``device``, and the ``host``: the device itself where there is no other place. is_full: it had
    no room; until somebody asks it again, everything is computed on the host."""

    device: torch.device
    host: torch.device
    is_full: bool = False

    @property
    def place(self) -> torch.device:
        return self.host if self.is_full else self.device

    def run(self, compute: Callable[[], Result]) -> Result:
        """Return what is computed at ``place``, at once or again. Raises what is no lack of the device's
        memory."""
        try:
            return compute()
        except RuntimeError as error:
            if self.place == self.host or not is_out_of_memory(error):
                raise
        self.is_full = True
        return compute()  # what was left by the first try is free here
