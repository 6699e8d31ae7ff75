"""fcdp-doctor: what FCDP would do, on this machine, for a script, or in a job that runs."""


class Failed(Exception):
    """There is nothing to show; the message says why, and what to do."""
