"""The gateway actor: the clients' door, the routes to sessions, the broker of permits."""

if __name__ != "callboard.actors.gateway":
    raise ImportError("this folder is callboard.actors.gateway; import it by that name")
