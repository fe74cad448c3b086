"""Checkpoints restore bitwise, elsewhere, and refuse what does not fit."""

import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trimoe_jax import optim
from trimoe_jax.checkpoint import Checkpointer, abstract, check_config

CONFIG = {'model': {'width': 8, 'mla_layers': (4, 8)}, 'seed': 0}


@struct.dataclass
class State:
  step: jax.Array
  params: dict
  opt_state: object
  router: dict
  key: jax.Array


def make_state(seed=0):
  keys = jax.random.split(jax.random.key(seed), 3)
  params = {
    'embedding': jax.random.normal(keys[0], (16, 8)),
    'layers': {'mlp': {'up': jax.random.normal(keys[1], (2, 8, 8))}},
  }
  tx = optim.make_optimizer(optim.OptimConfig(), params, lambda step: 1.0)
  return State(
    step=jnp.int32(seed),
    params=params,
    opt_state=tx.init(params),
    router={'bias': jax.random.normal(keys[2], (2, 4)) / 3},
    key=jax.random.fold_in(jax.random.key(seed), 7),
  )


@pytest.fixture(scope='module')
def state():
  return make_state()


def raw(tree):
  """Bytes of every leaf, keys included, so that equality is bitwise."""
  is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  data = lambda x: jax.random.key_data(x) if is_key(x) else x
  return [np.asarray(data(x)).tobytes() for x in jax.tree.leaves(tree)]


def test_round_trip_is_bitwise(tmp_path, state):
  nan = state.replace(router={'bias': state.router['bias'].at[0, 0].set(-0.0)})
  with Checkpointer(tmp_path / 'new' / 'run', config=CONFIG) as checkpoints:
    assert checkpoints.latest_step() is None
    saved = checkpoints.save(
      12, nan, data_position={'step': 12}, metadata={'stage': 1}
    )
    assert saved and not checkpoints.save(12, nan, data_position=None)
  with Checkpointer(tmp_path / 'new' / 'run', config=CONFIG) as checkpoints:
    got = checkpoints.restore(abstract(state))
  assert (got.step, got.data_position) == (12, {'step': 12})
  assert got.metadata == {'stage': 1}
  assert raw(got.state) == raw(nan)
  chex.assert_trees_all_equal_dtypes(got.state, nan)
  assert jax.tree.structure(got.state) == jax.tree.structure(nan)
  # The key still is one, and continues the same stream.
  chex.assert_trees_all_equal(
    jax.random.bits(got.state.key), jax.random.bits(nan.key)
  )


def test_a_state_may_be_donated_while_it_is_saved(tmp_path):
  big = {'x': jnp.arange(1_000_000.0)}
  want = raw(big)
  ahead = jax.jit(lambda s: jax.tree.map(lambda x: x * 2, s), donate_argnums=0)
  with Checkpointer(tmp_path) as checkpoints:
    shapes = abstract(big)
    checkpoints.save(1, big, data_position=None)
    for _ in range(5):
      big = ahead(big)
    checkpoints.wait()
    assert raw(checkpoints.restore(shapes).state) == want


def test_retention_keeps_the_latest_and_stage_ends(tmp_path):
  tree = {'x': jnp.zeros(3)}
  with Checkpointer(
    tmp_path, max_to_keep=2, keep_steps=(20, 40)
  ) as checkpoints:
    for step in (10, 20, 30, 40, 50, 60):
      checkpoints.save(step, tree, data_position=step)
    checkpoints.wait()
    assert checkpoints.steps() == [20, 40, 50, 60]
    assert checkpoints.restore(abstract(tree), 20).data_position == 20
    with pytest.raises(FileNotFoundError, match=r'step 30; it has \[20, 40'):
      checkpoints.restore(abstract(tree), 30)


def test_restores_onto_another_mesh(tmp_path, state):
  def place(shape, tree):
    mesh = jax.make_mesh(
      shape, ('data', 'tensor'), axis_types=(AxisType.Explicit,) * 2
    )
    matrix = NamedSharding(mesh, PartitionSpec('data', 'tensor'))
    whole = NamedSharding(mesh, PartitionSpec())
    shard = lambda x: matrix if x.shape == (16, 8) else whole
    return jax.tree.map(lambda x: jax.device_put(x, shard(x)), tree)

  with Checkpointer(tmp_path) as checkpoints:
    checkpoints.save(1, place((4, 2), state), data_position=0)
    checkpoints.wait()
    elsewhere = abstract(place((8, 1), make_state(1)))
    got = checkpoints.restore(elsewhere).state
  assert got.params['embedding'].sharding.mesh.shape == {'data': 8, 'tensor': 1}
  assert got.params['embedding'].addressable_shards[0].data.shape == (2, 8)
  moments = got.opt_state.inner_states['adamw'].inner_state[0].mu['embedding']
  assert moments.sharding.spec == PartitionSpec('data', 'tensor')
  assert raw(got) == raw(state)


def test_config_mismatch_names_the_first_field(tmp_path, state):
  with Checkpointer(tmp_path, config=CONFIG) as checkpoints:
    checkpoints.save(1, {'x': jnp.zeros(1)}, data_position=0)
  other = {'model': {'width': 8, 'mla_layers': (4, 7)}, 'seed': 1}
  with Checkpointer(tmp_path, config=other) as checkpoints:
    with pytest.raises(
      ValueError, match=r'model.mla_layers=\[4, 8\].*\[4, 7\]'
    ):
      checkpoints.restore(abstract({'x': jnp.zeros(1)}))
    assert checkpoints.steps() == [1]
  check_config({'a': [1, 2]}, {'a': (1, 2)})
  with pytest.raises(ValueError, match=r'b=\(no such field\).*b=3'):
    check_config({'a': 1}, {'a': 1, 'b': 3})


@pytest.mark.parametrize(
  'wrong, message',
  [
    ({'x': jnp.zeros((2, 3))}, r"'x' was saved as float32\[4\]"),
    ({'x': jnp.zeros(4, jnp.bfloat16)}, r'has bfloat16\[4\]'),
    ({'x': jnp.zeros(4), 'y': jnp.zeros(1)}, r"'y' was saved as \(absent\)"),
    ({}, r"'x' was saved as float32\[4\], but the run has \(absent\)"),
  ],
)
def test_a_state_that_differs_is_refused(tmp_path, wrong, message):
  with Checkpointer(tmp_path) as checkpoints:
    checkpoints.save(1, {'x': jnp.zeros(4)}, data_position=0)
    checkpoints.wait()
    with pytest.raises(ValueError, match=message):
      checkpoints.restore(abstract(wrong))
    assert checkpoints.steps() == [1]  # the caller's mistake, not damage


def test_unfinished_and_damaged_steps_are_skipped(tmp_path, caplog):
  tree = {'x': jnp.arange(4.0)}
  with Checkpointer(tmp_path) as checkpoints:
    for step in (1, 2, 3):
      checkpoints.save(step, tree, data_position=step)
  unfinished = tmp_path / '4.orbax-checkpoint-tmp-9'
  shutil.copytree(tmp_path / '3', unfinished)
  shutil.rmtree(tmp_path / '3' / 'state')
  (tmp_path / '2' / 'metadata' / 'metadata').write_text('{"config": nu')
  with caplog.at_level('WARNING'):
    with Checkpointer(tmp_path) as checkpoints:
      with pytest.raises(OSError, match='step 3'):
        checkpoints.restore(abstract(tree), 3)
      got = checkpoints.restore(abstract(tree))
      assert got.step == 1 and checkpoints.steps() == [1]
      assert checkpoints.save(2, tree, data_position=2)
      checkpoints.wait()
      assert checkpoints.restore(abstract(tree)).step == 2
  assert 'interrupted' in caplog.text
  assert 'step 3 cannot be read and is skipped' in caplog.text
  assert (tmp_path / 'unreadable-3').is_dir() and not unfinished.exists()


def test_when_all_are_damaged_none_is_touched(tmp_path):
  tree = {'x': jax.random.normal(jax.random.key(0), (1000,))}
  with Checkpointer(tmp_path) as checkpoints:
    checkpoints.save(1, tree, data_position=1)
    checkpoints.wait()
    blocks = [p for p in tmp_path.glob('1/state/**/d/*') if p.is_file()]
    largest = max(blocks, key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])
    with pytest.raises(OSError, match='can be read: step 1'):
      checkpoints.restore(abstract(tree))
    assert checkpoints.steps() == [1]


def test_nothing_to_restore_is_clear(tmp_path):
  with Checkpointer(tmp_path) as checkpoints:
    with pytest.raises(FileNotFoundError, match='has no finished checkpoint'):
      checkpoints.restore({})
  with pytest.raises(FileNotFoundError, match='missing does not exist'):
    Checkpointer(tmp_path / 'missing', read_only=True)
