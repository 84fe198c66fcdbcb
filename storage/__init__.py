"""The storage actor: the only writer of a home, and every reader of what it wrote."""

if __name__ != "callboard.storage":
    raise ImportError("this folder is callboard.storage; import it by that name")
