"""What the verbs with a --config flag share."""

import sys

from absl import app


def parse_flags(argv):
  """Parses flags; an unknown field or a missing file is one line, no trace."""
  try:
    return app.parse_flags_with_usage(argv)
  except (AttributeError, LookupError, OSError, ValueError) as error:
    text = str(error).replace('\\n', ' ').replace('\\', '').strip("'")
    sys.exit(f'error: --config: {text}')
