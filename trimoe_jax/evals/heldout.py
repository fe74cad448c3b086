"""What a run measures at a stage's end: loss, recall, depth-mix weights.

Everything here reads the state and changes nothing: the router routes with its
bias and observes no statistics.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trimoe_jax import hosts, sharding
from trimoe_jax.config import TrainConfig
from trimoe_jax.data import Batch, Corpus, Room
from trimoe_jax.evals.perplexity import LossMeter
from trimoe_jax.evals.questions import answers, examples, score
from trimoe_jax.evals.recall import needle_batch, score_recall
from trimoe_jax.losses import token_losses, token_predictions
from trimoe_jax.model.media import images_of
from trimoe_jax.model.model import Model
from trimoe_jax.model.router import RouterState
from trimoe_jax.model.vision_config import PATCH

# Batches of every context hold about as many tokens, so that one compiled
# function a context serves the held-out text and the needles.
INPUTS = ('tokens', 'targets', 'segment_ids')
IMAGES = ('patches', 'grids')
SHOWN = 18  # pictures that a report shows


class Evaluator:
  """Measures states of one run.

  Args:
    config: the run's.
    corpus: whose held-out documents are read.
    mesh: where the state lives.
    announce: called with a line when something cannot be measured.
  """

  def __init__(
    self,
    config: TrainConfig,
    corpus: Corpus,
    mesh: jax.sharding.Mesh,
    announce: Callable[[str], None],
  ):
    self._config, self._corpus, self._mesh = config, corpus, mesh
    self._announce = announce
    self._asks = config.data.source == 'pictures'
    self._compiled: dict[int, Any] = {}
    self._lock = threading.Lock()
    contexts = sorted({stage.context for stage in config.stages})
    self._needles = {n: self._draw_needles(n) for n in contexts}

  def measure(
    self,
    params: Any,
    router: RouterState,
    context: int,
    recall_at: Sequence[int] = (),
  ) -> dict[str, Any]:
    """One record: held-out loss at one context, needle recall at others.

    Args:
      params, router: of a train state.
      context: tokens in a held-out row.
      recall_at: contexts of stages to measure recall at; those too short for
        a needle are left out.
    """
    record = self._heldout(params, router, context)
    if self._asks and recall_at:
      record |= self._questions(params, router, context)
    record['recall'] = {
      str(n): self._recall(params, router, n)
      for n in recall_at
      if self._needles[n] is not None
    }
    return record

  def _questions(self, params, router, context) -> dict[str, Any]:
    """What the model answers about held-out pictures."""
    found = []
    for batch in self.batches(context):
      predicted = self._score(params, router, batch, context)['predictions']
      found.append(list(answers(batch, predicted, self._corpus.tokenizer)))
    together = [answer for own in found for answer in own]
    return {'questions': score(together), 'examples': examples(found, SHOWN)}

  def batches(self, context: int) -> list[Batch]:
    """The held-out rows of a context; always the same ones."""
    room = self._room(context)
    settings = self._config.eval.batches, self._rows(context)
    return self._corpus.heldout_batches(context, *settings, room)

  def _room(self, context: int) -> Room:
    """For images in a row: that of the stages with this context."""
    rooms = [s.room for s in self._config.stages if s.context == context]
    return Room(*map(max, zip(*rooms)))

  def _draw_needles(self, context: int) -> Batch | None:
    """The recall questions at `context`; None where they do not fit."""
    try:
      return needle_batch(
        self._corpus.tokenizer,
        self._corpus.heldout,
        context,
        count=self._config.eval.needles,
        seed=self._config.seed,
      )
    except ValueError as error:
      self._announce(f'no needle recall at {context} tokens: {error}')
      return None

  def _heldout(self, params, router, context) -> dict[str, Any]:
    tokenizer = self._corpus.tokenizer
    meter, depths = LossMeter(tokenizer.token_bytes), []
    for batch in self.batches(context):
      scores = self._score(params, router, batch, context)
      meter.add(scores['losses'], batch)
      depths.append(np.asarray(scores['depth']))
    result = meter.result()
    return {
      'context': context,
      'heldout_loss': result.nats_per_token,
      'bits_per_byte': result.bits_per_byte,
      'heldout_tokens': result.tokens,
      'by_position': [p._asdict() for p in result.by_position],
      'depth': np.mean(depths, 0),
    }

  def _recall(self, params, router, context) -> dict[str, Any]:
    needles = self._needles[context]
    predicted = [
      self._score(params, router, part, context)['predictions']
      for part in _parts(needles, self._rows(context))
    ]
    predicted = np.concatenate(predicted)[: self._config.eval.needles]
    result = score_recall(predicted, needles)
    return {
      'token_accuracy': result.token_accuracy,
      'token_chance': result.token_chance,
      'exact_match': result.exact_match,
      'rows': result.rows,
    }

  def _rows(self, context: int) -> int:
    shards = self._mesh.shape['data'] * self._mesh.shape['expert']
    rows = max(1, self._config.eval.batch_tokens // context)
    return -(-rows // shards) * shards

  def compile(self, params: Any, router: RouterState, context: int):
    """Compiles the scores of rows of `context` tokens, if that is not done.

    Args:
      params, router: of a state, or their shapes and shardings.
      context: tokens in a row.
    """
    with self._lock:
      if context in self._compiled:
        return
      inputs = self._abstract_inputs(context)
      with jax.set_mesh(self._mesh):
        run = jax.jit(lambda *args: score_tokens(*args, self._config))
        self._compiled[context] = run.lower(params, router, inputs).compile()

  def _abstract_inputs(self, context: int) -> dict[str, jax.ShapeDtypeStruct]:
    rows, room = self._rows(context), self._room(context)
    shapes = dict.fromkeys(INPUTS, ((rows, context), jnp.int32))
    if room.patches:
      pixels = (rows, room.patches, 3, PATCH, PATCH)
      shapes['patches'] = pixels, jnp.uint8
      shapes['grids'] = (rows, room.images, 3), jnp.int32
    return {
      name: jax.ShapeDtypeStruct(*shape, sharding=self._placement(name))
      for name, shape in shapes.items()
    }

  def _score(self, params, router, batch: Batch, context: int):
    """Losses and predictions [B, T] and depth weights of one batch."""
    self.compile(params, router, context)
    inputs = {}
    for name, x in self._abstract_inputs(context).items():
      # Needles come without images.
      value = batch.get(name, np.zeros(x.shape, x.dtype))
      inputs[name] = hosts.place(value, x.sharding)
    return hosts.fetch(self._compiled[context](params, router, inputs))

  def _placement(self, name: str) -> jax.NamedSharding:
    names = ('batch',) if name in IMAGES else ('batch', 'seq')
    return jax.NamedSharding(self._mesh, sharding.spec(names))


def score_tokens(
  params: Any, router: RouterState, batch: Batch, config: TrainConfig
) -> dict[str, jax.Array]:
  """Losses and most likely next tokens [B, T], and mean depth-mix weights."""
  hidden_btd, aux = Model(config.model).apply(
    {'params': params},
    batch['tokens'],
    router,
    batch['segment_ids'],
    images=images_of(batch),
    depth=True,
    method='hidden',
  )
  chunk = config.loss.chunk
  head_da = params['head']
  return {
    'losses': token_losses(hidden_btd, head_da, batch['targets'], chunk=chunk),
    'predictions': token_predictions(hidden_btd, head_da, chunk=chunk),
    'depth': aux.depth,
  }


def _parts(batch: Batch, rows: int) -> Iterator[Batch]:
  """`rows` rows at a time; the last part is filled up with padding."""
  total = batch['tokens'].shape[0]
  for start in range(0, total, rows):
    part = {k: batch[k][start : start + rows] for k in INPUTS}
    missing = rows - part['tokens'].shape[0]
    yield {k: np.pad(v, ((0, missing), (0, 0))) for k, v in part.items()}
