"""Sphinx's settings for the site; ``build.py`` puts the pages together and runs it."""

from curvlab import __version__

project = "curvlab"
author = "The curvlab authors"
copyright = author  # noqa: A001 (Sphinx asks for this name)
version = release = __version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
root_doc = "index"

html_theme = "furo"
html_title = f"curvlab {__version__}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False

myst_heading_anchors = 3
myst_enable_extensions = ["strikethrough"]

autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
