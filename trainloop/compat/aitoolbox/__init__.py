"""Run scripts written for AIToolbox 1.8 after adding one line before their own imports.

::

    import trainloop.compat.aitoolbox

    from aitoolbox.torchtrain.train_loop import TrainLoop

``aitoolbox`` and its modules are then provided by this package: AIToolbox's argument order, keyword names, defaults,
history keys, epoch numbers and files, on the loop of :mod:`trainloop`. Remaining differences are listed in the guide
*From AIToolbox*.
"""

from __future__ import annotations

from trainloop.compat.aitoolbox.modules import install

__all__ = ["install"]

# The import is the whole interface; ranks of ddp import this package with the loop they receive, and install it, too.
install()
