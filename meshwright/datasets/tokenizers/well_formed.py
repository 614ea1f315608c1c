"""Strings that no UTF-8 can hold, made into strings that it can."""


def well_formed(text: str) -> str:
    """`text` with U+FFFD for every half of a surrogate pair that stands alone.

    JSON can hold such halves ("\\ud83d"). tiktoken replaces them itself; tokenizers and
    sentencepiece would end the run instead.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
