"""The supervisor: the process tree and nothing else that can fail. It runs no user code."""

if __name__ != "callboard.supervisor":
    raise ImportError("this folder is callboard.supervisor; import it by that name")
