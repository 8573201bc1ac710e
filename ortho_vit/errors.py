"""The errors that callers catch by type, never by the text of a message."""

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """Something in the command line or a configuration that its user can correct."""


class CheckpointError(ValueError):
    """Zoo weights or a run checkpoint that are missing, damaged, or not what they claim to be."""


class DivergedError(FloatingPointError, RuntimeError):
    """Training cannot go on: a loss, a gradient or a weight is no longer finite, or a weight left its manifold."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint such as "; did you mean 'ortho_vit_nano'?", or nothing where no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
