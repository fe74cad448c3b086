"""Configurations: each file's `get_config(variant)` is one page to rerun."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from ml_collections import ConfigDict, config_dict


def as_config_dict(config: Any) -> ConfigDict:
  """A dataclass as the ConfigDict that command-line flags can override.

  Every field is there, so `--config.optim.lr=1e-3` works for all of them; a
  field that is None keeps its type for the flag's parser.
  """
  hints = typing.get_type_hints(type(config))
  values = {}
  for field in dataclasses.fields(config):
    values[field.name] = _value(getattr(config, field.name), hints[field.name])
  return ConfigDict(values)


def _value(value: Any, hint: Any) -> Any:
  if dataclasses.is_dataclass(value):
    return as_config_dict(value)
  if isinstance(value, tuple):
    return tuple(_value(v, None) for v in value)
  if value is None:
    options = typing.get_args(hint)
    kind = next(k for k in options if k is not types.NoneType)
    return config_dict.placeholder(typing.get_origin(kind) or kind)
  return value


def refuse_variant(variant: str, allowed: tuple[str, ...] = ()):
  """Raises ValueError when a variant that does not exist was asked for."""
  if variant and variant not in allowed:
    raise ValueError(
      f'variant={variant!r} does not exist; choose one of '
      f'{allowed or "none"}, or leave it out.'
    )


def as_dict(config: Any) -> Any:
  """Plain nested dictionaries, lists and values of a ConfigDict."""
  if isinstance(config, ConfigDict):
    return {name: as_dict(config[name]) for name in config}
  if isinstance(config, (tuple, list)):
    return [as_dict(value) for value in config]
  return config
