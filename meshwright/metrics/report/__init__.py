"""`meshwright report`: a run as one HTML page that needs no other file.

It reads the files of a dump folder and imports no torch. The command is `commands/report.py`.
"""
