"""What schedules cost in time: constants measured once per kind of GPU, and a model on top.

``python -m cp_dispatch calibrate`` measures and writes one JSON file here per kind of GPU
(:mod:`~cp_dispatch.costs.calibrate`); :mod:`~cp_dispatch.costs.constants` reads them;
:mod:`~cp_dispatch.costs.model` predicts from them and a plan alone, so that all ranks with one kind
of GPU predict alike. Without constants for a kind, nothing is predicted.
"""

from cp_dispatch.costs.constants import Constants, Curve, constants_of, digest_of, kind_of
from cp_dispatch.costs.model import Prediction, predict
from cp_dispatch.costs.pieces import Links

__all__ = [
    "Constants", "Curve", "Links", "Prediction", "constants_of", "digest_of", "kind_of", "predict",
]  # fmt: skip
