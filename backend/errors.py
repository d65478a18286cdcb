"""The errors that users can put right, and words that are not ours in a message; standard library only."""

#: Module of the errors that users see: ComfyUI's page writes it before the class, and the real one is a path.
SHORT = "parallel_dit"
#: What a rank says where an allocation has failed in the middle of a request: clients know it by that.
RAN_OUT = "ran out of memory"
#: How the sentence goes on where no request was under way.
ARRANGING = "while the ranks were arranged for other degrees"


class ConfigError(ValueError):
    """A ParallelConfig that cannot run; the message says what, why, the values and the remedy."""

    __module__ = SHORT


class UnsupportedError(ValueError):
    """A request, file or model that cannot run; the message says what, why, the values and the remedy. The
    backend stays warm."""

    __module__ = SHORT


def quoted(value: object, limit: int = 80) -> str:
    """Write a name or value out of a file for a message: cut to ``limit`` characters, in ASCII, with line
    breaks, terminal codes and marks that turn the direction of text escaped. A file may name its tensors as
    it likes, and messages are shown in terminals and in browsers."""
    if not isinstance(value, str):
        text = ascii(value)
        return text if len(text) <= limit else f"{text[:limit]}..."
    if len(value) <= limit:
        return ascii(value)
    return f"{ascii(value[:limit])}... ({len(value):,} characters)"


def some(names, most: int = 5) -> str:
    """Write the first ``most`` of ``names``, quoted, for a message."""
    names = list(names)
    return ", ".join(map(quoted, names[:most])) + (", ..." if len(names) > most else "")


def reason(error: BaseException | str, limit: int = 300) -> str:
    """Write what a library says of a file on one line, cut and without control characters: it may cite the
    file. An error that says nothing is called by its class."""
    text = " ".join(str(error).split())[:limit] or type(error).__name__
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
