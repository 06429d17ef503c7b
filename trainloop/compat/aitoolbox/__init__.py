"""Run scripts written for AIToolbox 1.8 after adding one line before their own imports.

::

    import trainloop.compat.aitoolbox

    from aitoolbox.torchtrain.train_loop import TrainLoop

This package then provides ``aitoolbox`` and its modules, with AIToolbox's argument order, keyword names, defaults,
history keys, epoch numbers and files. The training itself is done by :mod:`trainloop`. Remaining differences are listed
in the guide *From AIToolbox*.
"""

from __future__ import annotations

from trainloop.compat.aitoolbox.modules import install

__all__ = ["install"]

# Importing this package is its only interface. Ranks of ddp import the package with the loop that they receive.
install()
