"""Rows of packed documents: the user's files, images, positions, packing, sources and the loader."""

from jaxforge.data.batches import Batch, BatchLayout, batch_sharding
from jaxforge.data.conversation import SampleError
from jaxforge.data.digits import DigitsSource, EvalDocument, Sample
from jaxforge.data.files_source import FilesSource
from jaxforge.data.loader import Loader
from jaxforge.data.packing import IGNORE, Document, pack_row
from jaxforge.data.patches import Patches, patchify, smart_resize
from jaxforge.data.positions import mrope_positions
from jaxforge.data.rows import RowFormat
from jaxforge.data.sources import RowSource, eval_source, train_source
from jaxforge.data.synthetic import SyntheticSource
from jaxforge.data.tokenizer import ByteTokenizer

__all__ = [
    "IGNORE",
    "Batch",
    "BatchLayout",
    "ByteTokenizer",
    "DigitsSource",
    "Document",
    "EvalDocument",
    "FilesSource",
    "Loader",
    "Patches",
    "RowFormat",
    "RowSource",
    "Sample",
    "SampleError",
    "SyntheticSource",
    "batch_sharding",
    "eval_source",
    "mrope_positions",
    "pack_row",
    "patchify",
    "train_source",
    "smart_resize",
]
