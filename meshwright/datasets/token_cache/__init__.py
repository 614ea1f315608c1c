"""Documents tokenized once, into files that all jobs share.

A data set that is streamed never comes here: it is tokenized while it is read.
"""
