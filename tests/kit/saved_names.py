"""Names of this package in saved predictors and searches, which are pickles.

Files of earlier versions refer to these names. If you rename or move one, keep an alias under the old name, and the old
name in the list.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

NAMES = {
    "trainloop.model:TTBasicModel",
    "trainloop.model:TTModel",
    "trainloop.pretrained:PictureModel",
    "trainloop.pretrained:TextModel",
    "trainloop.resources.plan:Plan",
    "trainloop.resources.quota:ResourceQuota",
    "trainloop.tabular.columns:Columns",
    "trainloop.tabular.ensemble:Ensemble",
    "trainloop.tabular.ensemble:Trained",
    "trainloop.tabular.models:Estimator",
    "trainloop.tabular.models:Given",
    "trainloop.tabular.models:GradientBoosting",
    "trainloop.tabular.network:Layers",
    "trainloop.tabular.network:Network",
    "trainloop.tabular.network:OwnNetwork",
    "trainloop.tabular.network:PictureNetwork",
    "trainloop.tabular.network:TextNetwork",
    "trainloop.tabular.targets:Target",
    "trainloop.tuning.fitting:LoopModel",
    "trainloop.tuning.folds:Fold",
    "trainloop.tuning.result:BaggedPredictor",
    "trainloop.tuning.result:Trial",
    "trainloop.tuning.result:TuneResult",
    "trainloop.tuning.scoring:Scorer",
    "trainloop.tuning.scoring:_log_loss",
    "trainloop.tuning.scoring:_roc_auc_ovo",
}


def names_in(path: Path) -> set[str]:
    """Return the names of this package that a pickle refers to; it may follow the two lines of `write_checked`."""
    found = set()

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module.partition(".")[0] == "trainloop":
                found.add(f"{module}:{name}")
            return super().find_class(module, name)

    data = path.read_bytes()
    Unpickler(io.BytesIO(data.split(b"\n", 2)[2] if data.startswith(b"trainloop ") else data)).load()
    return found
