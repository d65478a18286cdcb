"""Whether backends fork their ranks (forking_agent/sitecustomize.py)."""

import os
from pathlib import Path

from pytest import MonkeyPatch

#: In PYTHONPATH it makes torchrun's agents fork their ranks.
FOLDER = str(Path(__file__).parent / "forking_agent")


def fork(patched: MonkeyPatch):
    """Have ranks forked that are started from now on."""
    patched.setenv("PYTHONPATH", FOLDER, prepend=os.pathsep)


def launch_really(patched: MonkeyPatch):
    """Have ranks that are started from now on import everything themselves, as users' do."""
    places = os.environ["PYTHONPATH"].split(os.pathsep)
    patched.setenv("PYTHONPATH", os.pathsep.join(place for place in places if place != FOLDER))
