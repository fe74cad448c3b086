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
