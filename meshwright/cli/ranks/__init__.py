"""The script that every rank runs, alone in its folder: Python looks for modules there first."""
