"""The commands that you type, a file or a folder for each, and the command line itself.

A command reads its options, calls a part of the house and prints the result. The work of `plan` and
`prove` is here, too, because no other part needs it.
"""
