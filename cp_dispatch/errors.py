"""The one error type that users see."""


class ContextParallelError(RuntimeError):
    """A call that cp_dispatch cannot run, refused before any communication.

    It is raised on every rank alike: each decision behind it depends only on what all ranks
    share (global shapes, placements, dtypes, options), never on local data.
    """
