"""The error type to catch, and what it also is where torch's own functions raise others."""


class ContextParallelError(RuntimeError):
    """A call that cp_dispatch cannot run, refused before any communication.

    For calls on DTensors it is raised on every rank alike: each decision behind it depends only on
    what all ranks share (global shapes, placements, dtypes, options), never on local data. A plain
    shard tells nothing about the other ranks: inside ``context_parallel`` a rank may be the only
    one to raise, while the others wait for it, unless ``CP_DISPATCH_DEBUG=1`` is set.
    """


class ContextParallelValueError(ContextParallelError, ValueError):
    """An argument that torch's functions of the same name refuse with a ValueError."""


class ContextParallelNotImplementedError(ContextParallelError, NotImplementedError):
    """An argument that torch's functions of the same name refuse with a NotImplementedError."""
