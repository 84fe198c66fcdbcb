"""Transcripts of other tools, read: a port, its formats, and scripts for the `replay` agent.

`port` is what a format is to the rest of callboard, `registry` finds the format of a file, and
`script` turns what a format reads into something that `replay` plays. Nothing is imported from
here: a session process takes the one module it needs.
"""
