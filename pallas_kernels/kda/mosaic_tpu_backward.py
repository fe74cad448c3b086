from typing import NamedTuple
class Cotangents(NamedTuple):
  out: object
  state: object
