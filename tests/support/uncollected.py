"""Leaves garbage alone where it is imported: imports leave none, and looking for it takes a second."""

import gc

gc.disable()
