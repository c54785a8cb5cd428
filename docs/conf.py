"""How the documentation is built: ``make docs``, into ``build/docs``.

Sphinx with MyST, because Lightning, PyTorch, NeMo and Megatron-core all use it, while MkDocs 1 is not kept up and
Material for it is maintained no longer since November 2026. The pages stay Markdown that GitHub
shows, too; warnings are errors, and so is a link or an anchor that leads nowhere.
"""

from __future__ import annotations

from importlib.metadata import version as version_of

project = "checkpointless"
author = "the checkpointless authors"
release = version_of("checkpointless")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_static"]

# --- pages ---

myst_heading_anchors = 4  # the anchors that GitHub makes
myst_enable_extensions = ["attrs_block"]

# --- API reference ---

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "literal"  # docstrings put names between single backticks here and there

# --- HTML ---

html_theme = "furo"
html_title = "checkpointless"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e4f", "color-brand-content": "#0b6e4f"},
    "dark_css_variables": {"color-brand-primary": "#5fd3a6", "color-brand-content": "#5fd3a6"},
}
pygments_style = "friendly"
pygments_dark_style = "native"
