"""``python -m mldserver.observe`` prints the README's table of log events."""

import sys

from mldserver.observe.table import events_table

sys.stdout.write(events_table())
