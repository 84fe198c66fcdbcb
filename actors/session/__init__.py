"""The session actor: one process for each leased session; it runs the session's agent.

Everything is imported here, so that the fork process has it before it forks and a session imports
nothing but its agent. `rehearse`, called there once before, makes sessions smaller.
"""

from callboard.actors.session.process import main as main
from callboard.actors.session.rehearsal import rehearse as rehearse
