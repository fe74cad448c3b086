"""One tensor of the released layout, as stored and as a parameter."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

# How a tensor is stored: a matrix [out, in] of which the parameter's first one
# or two axes are the input; its axes flattened; [1, d]; a convolution
# [channels, 1, taps]; unchanged; or zero-padded to the head dimension.
Form = Literal['in_1', 'in_2', 'flat', 'row', 'conv', 'same', 'padded']
Shape = tuple[int, ...]


class Tensor(NamedTuple):
  """One released tensor.

  Attributes:
    name: in the files, with its prefix; a packed expert stores two tensors,
      `name + '_packed'` and `name + '_scale'`.
    path: keys into {'params': ..., 'router': {'bias': ...}}.
    index: leading indices into that leaf (stacked layers, the expert).
    local: shape of the indexed part.
    stored: shape in the files when it is not packed.
    form: how the two are related.
    wide: whether the released file keeps it in float32.
  """

  name: str
  path: tuple[str, ...]
  index: tuple[int, ...]
  local: Shape
  stored: Shape
  form: Form
  wide: bool = False

  @property
  def is_expert(self) -> bool:
    return 'experts' in self.path

  def to_parameter(self, stored: np.ndarray) -> np.ndarray:
    """The parameter's values from the file's."""
    if self.form == 'padded':
      return stored[: self.local[0]]
    matrix = stored.T if self.form in ('in_1', 'in_2') else stored
    return matrix.reshape(self.local)

  def to_stored(self, local: np.ndarray) -> np.ndarray:
    """The file's values from the parameter's."""
    if self.form == 'padded':
      return np.pad(local, (0, self.stored[0] - self.local[0]))
    if self.form in ('in_1', 'in_2'):
      return local.reshape(self.stored[::-1]).T
    return local.reshape(self.stored)
