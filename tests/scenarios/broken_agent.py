"""A module that cannot be imported."""

raise RuntimeError("secret")
