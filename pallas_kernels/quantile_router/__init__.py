"""Top-k routing whose bias comes from a quantile of the required biases."""

from pallas_kernels.quantile_router.api import Routing, route
from pallas_kernels.quantile_router.statistics import (
  Statistics,
  crossing,
  quantile_of_counts,
  quantile_of_margins,
  target,
)

__all__ = [
  'Routing',
  'Statistics',
  'crossing',
  'quantile_of_counts',
  'quantile_of_margins',
  'route',
  'target',
]
