"""Replaces names of the product for the rest of a process that a test starts; tests themselves have `monkeypatch`."""

from __future__ import annotations


def replace_names(owner: object, **values: object) -> None:
    """Set attributes of a module or a class.

    Raises:
        AttributeError: It has no such attribute: the product's name has moved, and a new one would change nothing.
    """
    for name, value in values.items():
        getattr(owner, name)
        setattr(owner, name, value)
