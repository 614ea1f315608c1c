"""The commands that you type, a file or a folder for each, and the command line itself.

A command reads its options, calls a lower layer and prints the result. The work of `plan` and
`prove` is here as well, because no other part needs it.
"""
