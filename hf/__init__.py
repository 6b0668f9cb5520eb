"""Files as Hugging Face folders hold them. Here: the checks that all readers share."""

from model import InputError


def expect(valid, message):
    """Raises InputError with the message unless `valid`."""
    if not valid:
        raise InputError(message)


def one_of(what, value, supported):
    """The value. Raises InputError unless it is one of those supported, with their type."""
    expect(any(value == other and type(value) is type(other) for other in supported),
           f"{what} {value!r} is not supported; supported: {', '.join(map(str, supported))}")
    return value
