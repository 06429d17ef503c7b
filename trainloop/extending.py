"""Helpers for authors of callbacks, trackers and other add-ons; this module only collects names.

* arguments: :func:`count_of`, :func:`number_of`, :func:`path_of`, :func:`texts_of`, :func:`dict_of`,
  :func:`check_counts`, :func:`check_flags`, :func:`require_loader`, :func:`import_extra`
* hooks: :func:`logs_nothing` for a hook that sends values instead of logging them; :func:`keeps_state` for an
  ``on_epoch_end`` that does not change a large state; :class:`Saver` for a callback that writes between steps
* values: :class:`Tracker`, which collects step and epoch values for a service; :func:`lower_is_better` for a metric's
  name
* messages: :func:`warn`, which warns at the user's line
* optimizers: :func:`optimizers_of`, and :func:`groups_with_rates` for the learning rates of all groups
"""

from __future__ import annotations

from trainloop._support.distribution import import_extra
from trainloop._support.user_line import warn
from trainloop.callbacks.arguments import check_counts, check_flags, count_of, dict_of, number_of, path_of, texts_of
from trainloop.callbacks.base import Saver, keeps_state, logs_nothing, require_loader
from trainloop.callbacks.monitor import lower_is_better
from trainloop.callbacks.reports.trackers import Tracker
from trainloop.callbacks.weights.train_schedule import groups_with_rates
from trainloop.optim.optimizers import optimizers_of

__all__ = [
    "Saver",
    "Tracker",
    "check_counts",
    "check_flags",
    "count_of",
    "dict_of",
    "groups_with_rates",
    "import_extra",
    "keeps_state",
    "logs_nothing",
    "lower_is_better",
    "number_of",
    "optimizers_of",
    "path_of",
    "require_loader",
    "texts_of",
    "warn",
]
