"""Documents to samples of equal length, without padding."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.datasets.sources import Documents
from meshwright.datasets.tokenizers import Tokenizer
from meshwright.errors import ConfigError

MAX_LANES = 64
"""Documents that are read side by side, so that neighbouring samples come from different ones."""

Place = tuple[int, int]
"""(epoch, position in that epoch's order) of a document."""


@dataclass(frozen=True)
class Cursor:
    """A place in the stream of samples, the same for every rank: all that a resume needs."""

    sample: int = 0
    """Samples before it, over all epochs."""
    next_document: Place = (0, 0)
    """The first document that no lane has begun."""
    lanes: tuple[tuple[Place, int], ...] = ()
    """Of each lane that has begun: its document, and how many of its tokens, BOS and EOS
    included, are used up."""

    @classmethod
    def from_json(cls, value: dict[str, object]) -> "Cursor":
        """Undo `dataclasses.asdict` and JSON, which make lists of tuples."""
        return cls(**{name: _tuples(item) for name, item in value.items()})  # type: ignore[arg-type]


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass
class _Lane:
    document: Place
    tokens: list[int]
    """Of `document`."""
    used: int
    """How many of them have left the lane."""


class Packer:
    """Samples cut from BOS document EOS BOS document EOS ..., epoch after epoch, without end.

    Sample i comes from lane i modulo their number, which is `MAX_LANES` or, if an epoch has fewer
    documents, one for each: no text is read twice at a time. A lane that cannot fill a sample goes
    on with the next document that no lane has begun. Samples do not overlap and no token is left
    out; sample i depends on the arguments and i alone.

    Args:
        length: tokens a sample.
        cursor: where to begin.

    Raises:
        ConfigError: if the documents do not reach to the cursor.
    """

    def __init__(
        self, documents: Documents, tokenizer: Tokenizer, length: int, cursor: Cursor
    ) -> None:
        self._tokenizer, self._length = tokenizer, length
        self._before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        self._after = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        self._sample, self._next_document = cursor.sample, cursor.next_document
        begun = {place for place, _ in cursor.lanes}
        self._texts = _read(documents, min(begun | {cursor.next_document}))
        self._ahead: tuple[Place, str] | None = None
        found: dict[Place, list[int]] = {}
        while found.keys() != begun:
            place, text = next(self._texts)
            if place > max(begun):
                raise ConfigError(
                    "training.dataset",
                    "training.dataset: holds less than when the checkpoint was saved"
                    "\n  fix: restore the data, or use another job.dump_folder",
                )
            if place in begun:
                found[place] = self._encode(text)
        self._lanes = [_Lane(place, found[place], used) for place, used in cursor.lanes]

    @property
    def cursor(self) -> Cursor:
        """Where the next sample begins."""
        lanes = tuple((lane.document, lane.used) for lane in self._lanes)
        return Cursor(self._sample, self._next_document, lanes)

    def next_sample(self) -> list[int]:
        """The next `length` token ids.

        Raises:
            ConfigError: if a whole epoch does not fill a sample.
        """
        lane = self._next_lane()
        first_epoch = self._next_document[0]
        sample = lane.tokens[lane.used : lane.used + self._length]
        lane.used += len(sample)
        while len(sample) < self._length:
            lane.document, lane.tokens = self._begin_document()
            rest = lane.tokens[: self._length - len(sample)]
            lane.used = len(rest)
            sample += rest
            if lane.document[0] > first_epoch + 1:  # the whole epoch between went in
                raise _too_little(f"less than one sample of {self._length} tokens")
        self._sample += 1
        return sample

    def _next_lane(self) -> _Lane:
        """In turn; in the first round a new one, while the first epoch has documents for it."""
        if self._sample == len(self._lanes) < MAX_LANES:
            (epoch, _), _ = self._peek()
            if epoch == 0:
                self._lanes.append(_Lane(*self._begin_document(), used=0))
        return self._lanes[self._sample % len(self._lanes)]

    def _peek(self) -> tuple[Place, str]:
        self._ahead = self._ahead or next(self._texts)
        return self._ahead

    def _begin_document(self) -> tuple[Place, list[int]]:
        place, text = self._peek()
        self._ahead = None
        self._next_document = (place[0], place[1] + 1)
        return place, self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return self._before + self._tokenizer.encode(text) + self._after


def _read(documents: Documents, place: Place) -> Iterator[tuple[Place, str]]:
    """All documents from `place` on, epoch after epoch."""
    epoch, start = place
    while True:
        position = None
        for position, text in enumerate(documents.read(epoch, start), start):
            yield (epoch, position), text
        if position is None and start == 0:
            raise _too_little("no document")
        epoch, start = epoch + 1, 0


def _too_little(what: str) -> ConfigError:
    return ConfigError(
        "training.dataset",
        f"training.dataset: an epoch holds {what}\n  fix: add data, or lower training.seq_len",
    )
