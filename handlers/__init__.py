"""Ready-made handlers, each runnable: ``mldserver serve handlers.departures``.

* ``departures``, ``departures_daily``: JSON to rows, event-time windows, sums on Spark (what the demo runs).
* ``clicks:Clicks``: a class with a life cycle that takes whole batches.
* ``columns``: Arrow in, Arrow out, for much data.
* ``late_departures``: keyed state and timers.
* ``visits``: session windows, made of keyed state and timers.
* ``unusual_delays``: a lookup and a query, beside state and timers.
* ``raw``: every payload as it came, in windows of arrival time.
* ``audit``: side effects only, no rows, no Spark.
* ``shop``: orders of a DynamoDB table as they are placed, changed and cancelled (``mldserver demo --source dynamodb``).
* ``dynamodb_changes``: the changes of a DynamoDB table, as JSON.

A folder ``handlers`` of your own in the working directory may stand beside this one: its modules come first.
"""

from pkgutil import extend_path

_others = [path for path in extend_path(__path__, __name__) if path not in __path__]
__path__ = [*_others, *__path__]
