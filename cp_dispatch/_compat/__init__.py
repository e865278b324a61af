"""Every private torch symbol that cp_dispatch uses, in one place.

Tested against torch 2.11, 2.13 and 2.14 (``tests/test_compat.py``). Nothing else in the package
may use a name that torch marks as private, but for ``Tensor._version``, which its docs name. All
others import from here, whatever module a name is in.
"""

from cp_dispatch._compat import dispatcher, distributed, graphs
from cp_dispatch._compat.dispatcher import *  # noqa: F403
from cp_dispatch._compat.distributed import *  # noqa: F403
from cp_dispatch._compat.graphs import *  # noqa: F403

__all__ = [*dispatcher.__all__, *distributed.__all__, *graphs.__all__]
