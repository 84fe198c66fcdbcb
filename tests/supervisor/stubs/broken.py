"""A module that cannot be imported."""

raise RuntimeError("what it says is data")
