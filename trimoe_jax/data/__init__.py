"""Text in, batches out: tokenizers, sources, packing and context stages."""

from trimoe_jax.data.corpus import Corpus as Corpus
from trimoe_jax.data.corpus import load_corpus as load_corpus
from trimoe_jax.data.packing import Batch as Batch
from trimoe_jax.data.packing import Documents as Documents
from trimoe_jax.data.packing import Room as Room
from trimoe_jax.data.sources import DataConfig as DataConfig
from trimoe_jax.data.sources import Document as Document
from trimoe_jax.data.sources import read_documents as read_documents
from trimoe_jax.data.stages import StageConfig as StageConfig
from trimoe_jax.data.stages import StagedBatches as StagedBatches
from trimoe_jax.data.tokenizer import ByteTokenizer as ByteTokenizer
from trimoe_jax.data.tokenizer import (
  HuggingFaceTokenizer as HuggingFaceTokenizer,
)
from trimoe_jax.data.tokenizer import Tokenizer as Tokenizer
from trimoe_jax.data.tokenizer import load_tokenizer as load_tokenizer
