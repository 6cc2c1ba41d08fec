"""The error of the rehearsal site."""


class SiteError(Exception):
    """A part of the rehearsal site could not be started, has died, or cannot be stopped; the text says what to do."""
