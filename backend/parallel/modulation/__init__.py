"""Modulation computed ahead of the steps, cached and sent to the device."""
