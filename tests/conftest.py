"""Settings that must be in the environment before JAX starts."""

import os

# On two cores the multi-device CPU collectives deadlock without NPROC.
os.environ.setdefault('NPROC', '16')
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
)
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')

import jax  # noqa: E402
import pytest  # noqa: E402

from pallas_kernels import tpu_schedule  # noqa: E402
from trimoe_jax.config import TrainConfig, from_dict  # noqa: E402


@pytest.fixture(scope='session', autouse=True)
def _compile_once(tmp_path_factory):
  """Runs of the same step in one session share its compilation."""
  cache = tmp_path_factory.mktemp('compilation_cache')
  jax.config.update('jax_compilation_cache_dir', str(cache))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 1.0)


@pytest.fixture(scope='session', autouse=True)
def _schedules_whoever_loads_libtpu():
  """libtpu writes schedules in all of a process or in nothing of it."""
  tpu_schedule.dump_directory()


@pytest.fixture(scope='session')
def text_folder(tmp_path_factory):
  """Sixty short documents of arithmetic, and one long one."""
  folder = tmp_path_factory.mktemp('text')
  for n in range(60):
    lines = [f'{i} times {n} is {i * n}.' for i in range(1, 40)]
    (folder / f'table_{n:02d}.txt').write_text('\n'.join(lines))
  (folder / 'long.txt').write_text(' '.join(str(i) for i in range(2000)))
  return folder


@pytest.fixture(scope='session')
def small_config(text_folder):
  """Builds a TrainConfig of two short stages; keywords override its fields."""

  def build(**overrides) -> TrainConfig:
    head = dict(heads=2, value_dim=8)
    values = dict(
      model=dict(
        vocab_size=264,
        width=24,
        layers=3,
        mla_layers=[3],
        dense_hidden=32,
        residual_block=2,
        dtype='float32',
        kda=dict(key_dim=8, gate_rank=4, chunk_size=16, **head),
        mla=dict(query_rank=8, kv_rank=8, nope_dim=8, shared_dim=4, **head),
        moe=dict(experts=4, top_k=1, hidden=8, latent=16),
      ),
      data=dict(source=str(text_folder), heldout_fraction=0.2),
      stages=[
        dict(context=64, batch=4, steps=4),
        dict(context=128, batch=2, steps=6, peak=0.5),
      ],
      optim=dict(lr=1e-2),
      eval=dict(batches=1, batch_tokens=256, needles=5, sample_tokens=8),
      checkpoint=dict(every_steps=3),
    )
    return from_dict(TrainConfig, values | overrides)

  return build
