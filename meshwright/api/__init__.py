"""What `import meshwright` offers to Python: notebooks, scripts and tests of your own.

`meshwright/__init__.py` imports a name from here when it is first used. docs/python.md shows each.
"""
