"""What the user can mend."""


class Error(Exception):
    """The text says what is wrong, and what to do."""
