"""Models: split any torch module into layers and measure what every cut of it costs."""

from adaptsfl.models.build import BuiltModel, build
from adaptsfl.models.pieces import Piece
from adaptsfl.models.profile import Optimizer, WireDtype, profile
from adaptsfl.models.split import Granularity, SplitModel, split
from adaptsfl.models.zoo import ZOO, ZooModel

__all__ = [
    "ZOO",
    "BuiltModel",
    "Granularity",
    "Optimizer",
    "Piece",
    "SplitModel",
    "WireDtype",
    "ZooModel",
    "build",
    "profile",
    "split",
]
