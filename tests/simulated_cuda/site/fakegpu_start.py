"""Where FAKEGPU is set, fakegpu is installed as soon as torch has been imported. Imported by a .pth file (run.sh)."""

import importlib.abc
import importlib.util
import os
import sys

if os.environ.get("FAKEGPU"):

    class _AfterTorch(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "torch":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec("torch")
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                import fakegpu

                fakegpu.install()

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, _AfterTorch())
