"""Actors: the session (one process for each leased session) and the gateway (the door)."""

if __name__ != "callboard.actors":
    raise ImportError("import callboard.actors, not actors")
