"""Data: load datasets into memory, partition them among devices, and return the mini-batches of every round."""

from adaptsfl.data.augment import augment
from adaptsfl.data.batches import Batch, DeviceBatches, evaluation_batches
from adaptsfl.data.datasets import load_dataset
from adaptsfl.data.partition import Parts, averaging_weights, check_parts, dirichlet, iid, make_partition, shards
from adaptsfl.data.prepare import PreparedData, content_of, load_part, prepare, share_out
from adaptsfl.data.samples import Dataset, Normalisation, Samples

__all__ = [
    "Batch",
    "Dataset",
    "DeviceBatches",
    "Normalisation",
    "Parts",
    "PreparedData",
    "Samples",
    "augment",
    "averaging_weights",
    "check_parts",
    "content_of",
    "dirichlet",
    "evaluation_batches",
    "iid",
    "load_dataset",
    "load_part",
    "make_partition",
    "prepare",
    "shards",
    "share_out",
]
