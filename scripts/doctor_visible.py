"""Which of the GPUs that nvidia-smi lists a process of this environment sees."""

from collections.abc import Mapping

from backend.client.auto.measurements import bare_uuid

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible(rows: list[dict[str, str]], uuids: list[str], variables: Mapping[str, str]) -> list[dict]:
    """Return the GPUs among nvidia-smi's ``rows`` that are not hidden. ``uuids``: of those that torch sees,
    which tell where it has them: it numbers the fastest GPU first, nvidia-smi the first slot."""
    if VISIBLE not in variables:
        return rows
    listed = [bare_uuid(each.strip()) for each in variables[VISIBLE].split(",")]
    if any(each.startswith("mig-") for each in listed):  # parts of GPUs, of which nvidia-smi lists the whole
        return rows
    by_driver = {bare_uuid(row.get("uuid", "")): row for row in rows}
    if uuids and all(uuid and uuid in by_driver for uuid in uuids):
        return [row for uuid, row in by_driver.items() if uuid in uuids]
    return [row for row in rows if any(_is_named(row, name) for name in listed)]


def _is_named(row: Mapping[str, str], name: str) -> bool:
    """Return whether an entry of CUDA_VISIBLE_DEVICES is this GPU: its index, or how its UUID begins."""
    if name.isdecimal():
        return row["index"] == name
    return bool(name) and bare_uuid(row.get("uuid", "")).startswith(name)
