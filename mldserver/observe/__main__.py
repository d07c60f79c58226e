"""``python -m mldserver.observe > mldserver/docs/events.md`` writes the page of log events."""

import sys

from mldserver.observe.events_page import events_page

sys.stdout.write(events_page())
