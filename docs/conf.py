"""Sphinx's configuration; `make docs` builds with -W, so a warning is an error."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

sys.path.insert(0, os.path.abspath(".."))

project = "trainloop"
author = copyright = "The trainloop authors"
try:
    release = version_of("trainloop")
except PackageNotFoundError:
    release = "unknown"
version = release

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build"]
templates_path: list[str] = []
nitpicky = False
default_role = "py:obj"

html_theme = "furo"
html_title = f"trainloop {release}"
html_static_path = ["_static"]
html_show_sphinx = False
pygments_style = "friendly"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
autoclass_content = "class"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
suppress_warnings = ["config.cache"]
