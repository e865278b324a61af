"""Predicts how long schedules take, from constants that are measured once per kind of GPU.

``python -m cp_dispatch calibrate`` measures the constants and writes one JSON file per kind of GPU
into this folder (:mod:`~cp_dispatch.costs.calibrate`). :mod:`~cp_dispatch.costs.constants` reads
them. :mod:`~cp_dispatch.costs.model` predicts from them and a plan only, so all ranks with the same
kind of GPU predict the same. Without constants for a kind, nothing is predicted.
"""

from cp_dispatch.costs.constants import Constants, Curve, constants_of, digest_of, kind_of
from cp_dispatch.costs.model import Prediction, predict
from cp_dispatch.costs.pieces import Links

__all__ = [
    "Constants", "Curve", "Links", "Prediction", "constants_of", "digest_of", "kind_of", "predict",
]  # fmt: skip
