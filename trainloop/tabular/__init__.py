"""Train on tables, text and pictures under one quota: a predictor like AutoGluon's ``TabularPredictor``.

:class:`TabularPredictor` trains several models with :func:`trainloop.tuning.tune`, each in a separate process, and
combines them into a weighted ensemble. It first prints how it divides the resources. It needs the extra ``tabular``.
Text and pictures need ``multimodal``, too.
"""

from __future__ import annotations

from trainloop._support.distribution import pip_install
from trainloop.errors import ConfigurationError

try:
    import pandas  # noqa: F401
    import sklearn  # noqa: F401
except ImportError as error:
    raise ConfigurationError(f"trainloop.tabular needs {error.name}: {pip_install('tabular')}.") from error

from trainloop.tabular.predictor import TabularPredictor
from trainloop.tabular.specs import get_hyperparameter_config, list_image_models, list_text_presets

__all__ = ["TabularPredictor", "get_hyperparameter_config", "list_image_models", "list_text_presets"]
