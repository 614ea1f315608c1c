"""Documents tokenised once, into files that all jobs share.

A data set that is streamed never comes here: it is tokenised while it is read.
"""
