"""Sphinx's configuration; `make docs` builds with -W, so a warning is an error."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path

sys.path[:0] = [os.path.abspath(".."), os.path.dirname(__file__)]

import elsewhere  # noqa: E402

project = "trainloop"
author = copyright = "The trainloop authors"
try:
    release = version_of("tt-trainloop")
except PackageNotFoundError:
    release = "unknown"
version = release

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
# Links to the pages of PyTorch, Python and NumPy, without network. DOCS_ONLINE=1 asks their own inventories instead.
if os.environ.get("DOCS_ONLINE") == "1":
    intersphinx_mapping = {project: (site, None) for project, site in elsewhere.SITES.items()}
else:
    intersphinx_mapping = elsewhere.write(Path(__file__).parent / "_build" / "inventories")
exclude_patterns = ["_build"]
templates_path = ["_templates"]
autosummary_generate = True
# Whatever a guide or a docstring refers to is there, here or elsewhere. But types: numpy's form writes them in words.
nitpicky = True
nitpick_ignore_regex = [("py:class", ".*"), ("py:obj", r".*\.ModelT")]
default_role = "py:obj"

html_theme = "furo"
if (
    os.environ.get("DOCS_WARNINGS_ONLY") == "1"
):  # as in CI: furo and the pages of source code take two thirds of the time
    html_theme = "basic"
    extensions.remove("sphinx.ext.viewcode")
html_title = f"trainloop {release}"
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_sphinx = False
pygments_style = "friendly"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# As written in the source: names of argument_types.py, and defaults, in place of their values.
autodoc_preserve_defaults = True
autodoc_type_aliases = {
    name: name
    for name in ("Accelerator", "Amp", "Collate", "Devices", "GpuMode", "Loader", "ModelT", "Modules", "Optimizers")
} | {"StartMethod": "StartMethod", "Transform": "Transform"}
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
autoclass_content = "class"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
suppress_warnings = ["config.cache"]
python_maximum_signature_line_length = 88  # longer signatures have one argument a line


def keep_sentences(app, what, name, obj, options, lines):  # type: ignore[no-untyped-def]
    """Undo that napoleon takes the words before an attribute's first colon for its type."""
    marks = [line for line in lines if line.startswith(":type: ")]
    if what in ("attribute", "data", "property") and marks:
        lines.remove(marks[0])
        lines[0] = f"{marks[0].removeprefix(':type: ')}: {lines[0]}"


def check_pages(app, error):  # type: ignore[no-untyped-def]
    """Fail if words of an attribute's text have become its type all the same."""
    for page in sorted(Path(app.outdir, "api").rglob("*.html")):
        if error is None and 'Type<span class="colon">' in page.read_text():
            raise ValueError(f"{page}: an attribute's text begins with 'Type:'. See keep_sentences in docs/conf.py.")


def say_where_names_come_from(app, docname, source):  # type: ignore[no-untyped-def]
    """Say below the title of each guide which names its examples take from the first page."""
    uses = any(name in source[0] for name in ("Net(", "(Net)", "train_loader"))
    if not docname.startswith("guides/") or ".. code-block:: python" not in source[0] or not uses:
        return
    title, line, *rest = source[0].split("\n")
    note = "*The examples continue the program of* :doc:`/index`, *which defines* ``Net``, ``data``, ``train_loader``,"
    note += "\n``val_loader``, ``test_loader``, ``model``, ``optimizer`` *and* ``criterion``."
    source[0] = "\n".join([title, line, "", note, *rest])


def setup(app):  # type: ignore[no-untyped-def]
    app.connect("autodoc-process-docstring", keep_sentences, priority=501)
    app.connect("source-read", say_where_names_come_from)
    app.connect("build-finished", check_pages)
