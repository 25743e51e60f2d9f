"""What Sphinx is told about the site. build.py copies the pages and runs it."""

import os

project = "Switchyard"
author = "the Switchyard authors"
release = os.environ["SITE_RELEASE"]
html_title = f"Switchyard {release}"

extensions = ["myst_parser"]
smartquotes = False
myst_heading_anchors = 6  # named as GitHub names them
root_doc = "index"

html_theme = "furo"
templates_path = ["templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "versions.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_copy_source = False
html_use_index = False
html_show_sphinx = False
html_show_copyright = False
