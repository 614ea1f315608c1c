"""Bytes of files by ranges: on a file system, in object storage, or kept of it locally."""
