"""In place of setuptools while pip fetches an sdist: none of its code runs, and what it builds with is not needed."""
