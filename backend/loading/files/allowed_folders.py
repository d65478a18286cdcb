"""Below which folders a client may have files loaded; standard library only."""

import os
from dataclasses import dataclass
from pathlib import Path, PurePath

from ...errors import UnsupportedError, quoted, reason, some


@dataclass(frozen=True)
class Folders:
    """Folders (absolute paths) below which clients may load files; None: no limit (started by hand)."""

    roots: tuple[str, ...] | None = None

    @classmethod
    def of(cls, roots: list[str] | None) -> "Folders":
        """Make ``roots`` of a command line absolute; None where the option was not given."""
        return cls(None if roots is None else tuple(os.path.abspath(root) for root in roots))

    def check(self, path: str):
        """Refuse a path that a client names, before anything there is looked at. Raises UnsupportedError.

        A path is allowed where it lies below a root as it is written: users link to models on other disks,
        and only who may write in a root made the link. Or once links are followed: a root may have another
        name. A path with ".." is neither: after a link it does not lead where it seems to.
        """
        if self.roots is None:
            return
        try:
            real = os.path.realpath(path)
        except (OSError, ValueError) as error:  # too long, a NUL in it, a letter that is none
            raise UnsupportedError(f"{quoted(path)} is no path ({reason(error)}); choose another.") from None
        if not os.path.isabs(path) or ".." in PurePath(path).parts:
            what = f"the path {quoted(path, 200)} is not absolute, or has '..' in it"
            raise UnsupportedError(f"{what}; name the file's full path.")
        if not (_below(path, self.roots) or self.holds(real)):
            raise UnsupportedError(
                f"{quoted(path, 200)} is not below a folder from which this backend may load "
                f"({some(self.roots) or 'there is none'}); move the file there, or start the backend with "
                f"--models and its folder."
            )

    def holds(self, real: str | Path) -> bool:
        """Return whether a path without links lies below a root; False where there are no roots."""
        return _below(real, [os.path.realpath(root) for root in self.roots or ()])


def _below(path, roots) -> bool:
    return any(PurePath(os.path.normpath(path)).is_relative_to(root) for root in roots)


#: No limit.
ANYWHERE = Folders()
