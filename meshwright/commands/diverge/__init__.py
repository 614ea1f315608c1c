"""Where two runs part: a key, a document, a module, or an element of a tensor."""
