"""The error type to catch, and what it also is where torch's own functions raise others."""


class ContextParallelError(RuntimeError):
    """A call that cp_dispatch cannot run, refused before any communication.

    It is raised on every rank alike: each decision behind it depends only on what all ranks
    share (global shapes, placements, dtypes, options), never on local data.
    """


class ContextParallelValueError(ContextParallelError, ValueError):
    """An argument that torch's functions of the same name refuse with a ValueError."""


class ContextParallelNotImplementedError(ContextParallelError, NotImplementedError):
    """An argument that torch's functions of the same name refuse with a NotImplementedError."""
