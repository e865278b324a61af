"""The error to catch, and subclasses that are also the error torch's own functions raise."""


class ContextParallelError(RuntimeError):
    """Raised for a call that cp_dispatch cannot run, before any communication.

    For calls on DTensors, every rank raises it: the decision depends only on what all ranks know
    (global shapes, placements, dtypes, options), never on local data. A plain shard says nothing
    about the other ranks, so inside ``context_parallel`` a single rank may raise while the others
    wait for it, unless ``CP_DISPATCH_DEBUG=1`` is set.
    """


class ContextParallelValueError(ContextParallelError, ValueError):
    """An argument for which torch's function of the same name raises ``ValueError``."""


class ContextParallelNotImplementedError(ContextParallelError, NotImplementedError):
    """An argument for which torch's function of the same name raises ``NotImplementedError``."""
