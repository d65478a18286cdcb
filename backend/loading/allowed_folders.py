"""Below which folders a client may have files loaded; standard library only."""

import os
from dataclasses import dataclass
from pathlib import Path, PurePath

from ..errors import UnsupportedError, quoted, reason, some


@dataclass(frozen=True)
class Folders:
    """``roots``: absolute paths of folders; None: no limit, as for whoever started the backend by hand."""

    roots: tuple[str, ...] | None = None

    @classmethod
    def of(cls, roots: list[str] | None) -> "Folders":
        """``roots`` of a command line, made absolute; None where the option was not given."""
        return cls(None if roots is None else tuple(os.path.abspath(root) for root in roots))

    def check(self, path: str):
        """Refuse a path that a client names, before anything there is looked at. Raises UnsupportedError.

        A path is allowed where it lies below a root as it is written, or once links are followed. As it is
        written: users keep models on other disks and link to them, and only who may write in a root can have
        made the link. With links followed: a root may itself be reached by another name. A path with ".."
        is neither, since after a link it does not lead where it seems to.
        """
        if self.roots is None:
            return
        try:
            real = os.path.realpath(path)
        except (OSError, ValueError) as error:  # too long, a NUL in it, a letter that is none
            raise UnsupportedError(f"{quoted(path)} is no path ({reason(error)}); choose another.") from None
        if not os.path.isabs(path) or ".." in PurePath(path).parts:
            raise UnsupportedError(
                f"the path {quoted(path, 200)} is not absolute, or has '..' in it; name the file by its full "
                f"path."
            )
        if not (_below(path, self.roots) or self.holds(real)):
            raise UnsupportedError(
                f"{quoted(path, 200)} is not below a folder from which this backend may load "
                f"({some(self.roots) or 'there is none'}); move the file there, or start the backend with "
                f"--models and its folder."
            )

    def holds(self, real: str | Path) -> bool:
        """Whether a path without links lies below a root; False where there are no roots to lie below."""
        return _below(real, [os.path.realpath(root) for root in self.roots or ()])


def _below(path, roots) -> bool:
    return any(PurePath(os.path.normpath(path)).is_relative_to(root) for root in roots)


#: No limit.
ANYWHERE = Folders()
