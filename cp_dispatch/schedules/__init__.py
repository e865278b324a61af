"""Who computes which block when, and what travels.

A schedule is a module-like object with ``forward`` and ``backward`` (see
:mod:`cp_dispatch.schedules.ring`). To add one, name it in ``SCHEDULES``; it becomes a choice of
``enable(schedule=...)``.
"""

from cp_dispatch.schedules import ring

SCHEDULES = {"ring": ring}

__all__ = ["SCHEDULES"]
