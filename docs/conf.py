"""The site: `make docs` builds it into build/docs, without a network; warnings are errors."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import treewise  # noqa: E402

project = "treewise"
author = "the authors of treewise"
copyright = author
version = release = treewise.__version__

extensions = [
    "cyclopts.ext.sphinx",
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
# What the adapters are for: heavy, and not needed to read their docstrings.
autodoc_mock_imports = ["cloudpickle", "kvpress", "lm_eval", "ray", "reasoners", "treequest"]

myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_heading_anchors = 3

smartquotes = False
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
numpydoc_show_class_members = False

html_theme = "furo"
html_title = f"treewise {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
