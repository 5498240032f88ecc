"""Limits how long a text in the stats may be."""

MAX_TEXT = 1000  # characters of one text: every open browser gets all of them, again and again


def bounded(text: str) -> str:
    """Returns ``text``, or its beginning and how much was left out."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text) - MAX_TEXT:,} more characters)"
