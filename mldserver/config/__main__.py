"""``python -m mldserver.config`` prints the README's table of settings."""

import sys

from mldserver.config.table import settings_table

sys.stdout.write(settings_table())
