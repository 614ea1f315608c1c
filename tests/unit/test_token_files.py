"""Files of tokens that others have made: the same tokens and documents, read where they lie."""

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.datasets.data_file import DataFile
from meshwright.datasets.files import token_paths
from meshwright.datasets.foreign_tokens import CHUNK, open_array
from meshwright.datasets.named_sources import check_files, check_path
from meshwright.datasets.samples import CachedSamples
from meshwright.datasets.sources import find_dataset
from meshwright.datasets.storage import stat
from meshwright.datasets.token_cache.cache import TokenCache
from meshwright.datasets.token_cache.tokenizing import open_cache
from meshwright.system.errors import ConfigError
from tests.helpers.texts import entry, tokenization

EOS = 257  # of the byte tokenizer
DOCUMENTS = [[104, 105, EOS], [119, 111, 114, 108, 100, EOS], [97, 98, 99, 100, EOS]]
MEGATRON = Path(__file__).parents[1] / "assets" / "megatron"
"""Written by megatron-core 0.16.1's `IndexedDatasetBuilder`, as uint16 and int32: DOCUMENTS, each a
sequence; then one document of two sequences, [1, 2] and [3, 4, EOS]."""


def open_tokens(folder: Path, dataset: str, path: Path, *, check_all: bool = False) -> TokenCache:
    spec = tokenization(dataset=dataset, dataset_path=str(path))
    return open_cache(spec, folder / "cache", num_workers=1, check_all=check_all)


def documents_of(cache: TokenCache) -> list[list[int]]:
    lengths = cache.lengths(0).tolist()
    ends = np.cumsum(lengths).tolist()
    return [cache.tokens(end - n, end).tolist() for n, end in zip(lengths, ends, strict=True)]


def flat(documents: list[list[int]], dtype: str = "<u2") -> np.ndarray:
    return np.array([token for document in documents for token in document], dtype)


@pytest.mark.parametrize("name", ["small", "small.bin", "small.idx", "wide"])
def test_megatron_by_any_of_its_names(name: str, tmp_path: Path) -> None:
    path = MEGATRON / name
    if name.endswith(".idx"):
        path = path.with_suffix(".*")
    cache = open_tokens(tmp_path, "megatron", path)
    assert documents_of(cache) == [*DOCUMENTS, [1, 2, 3, 4, EOS]]


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_a_refused_file_of_megatron_is_named(ending: str, monkeypatch) -> None:
    def refused(path: str) -> DataFile:
        raise ConfigError("", f"{path} cannot be read\n  fix: let this user read it")

    monkeypatch.setattr("meshwright.datasets.files.stat", refused)
    with pytest.raises(ConfigError, match=r"^s3://bucket/small\.bin cannot be read"):
        token_paths(entry(dataset="megatron", dataset_path=f"s3://bucket/small.{ending}"))


def write_llm_c(path: Path, documents: list[list[int]]) -> None:
    """As llm.c's `write_datafile`: documents begin with EOS."""
    header = np.zeros(256, np.int32)
    tokens = flat([[EOS, *document[:-1]] for document in documents])
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())


DTYPES = {"numpy": "<u2", "numpy 32": "<u4", "numpy 64": "<i8"}


def write_kind(kind: str, path: Path, documents: list[list[int]]) -> Path:
    is_bin = kind in ("nanoGPT", "llm.c")
    path = path.with_suffix(".ds" if "datatrove" in kind else ".bin" if is_bin else ".npy")
    if kind in DTYPES:
        np.save(path, flat(documents, DTYPES[kind]))
    elif kind == "llm.c":
        write_llm_c(path, documents)
    else:  # no header; as olmo has it, also under the name .npy
        flat(documents).tofile(path)
    if kind == "datatrove":
        np.cumsum([len(document) for document in documents], dtype="<u8").tofile(f"{path}.index")
    return path


KINDS = ["numpy", "numpy 32", "numpy 64", "olmo", "llm.c", "nanoGPT", "datatrove"]
KINDS += ["datatrove without index"]


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_one_array(kind: str, tmp_path: Path) -> None:
    first = write_kind(kind, tmp_path / "a", DOCUMENTS[:2])
    write_kind(kind, tmp_path / "b", DOCUMENTS[2:])
    cache = open_tokens(tmp_path, "tokens", tmp_path / f"*{first.suffix}")
    wanted = DOCUMENTS
    if kind == "llm.c":
        wanted = [[EOS, *document[:-1]] for document in DOCUMENTS]
    assert documents_of(cache) == wanted
    assert cache.num_bytes == 2 + 5 + 4
    assert not list(cache.folder.glob("*.tokens"))  # nothing is copied


@pytest.mark.parametrize("kind", ["megatron", "tokens"])
def test_documents_are_those_of_the_index_whatever_ends_them(kind: str, tmp_path: Path) -> None:
    """A document whose end was truncated has no EOS, and must not merge with the next one."""
    documents = [[104, EOS, 105, EOS], [119, 111, 114], [97, 98, EOS], [99]]
    path = write_kind("datatrove", tmp_path / "a", documents)
    if kind == "megatron":
        path = path.rename(tmp_path / "a.bin")
        sizes = [len(document) for document in documents]
        count, starts = len(sizes), np.cumsum([0, *sizes])
        head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1)
        arrays = (np.array(sizes, "<i4"), (2 * starts[:-1]).astype("<i8"), np.arange(count + 1))
        (tmp_path / "a.idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))
    assert documents_of(open_tokens(tmp_path, kind, path)) == documents


def test_samples_are_those_of_a_cache_of_our_own(tmp_path: Path) -> None:
    """The same tokens and boundaries give the same order, whatever file they are in."""
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(0, 256, n).tolist(), EOS] for n in rng.integers(1, 90, 300)]
    orders = []
    for kind in ("numpy", "nanoGPT", "olmo", "datatrove", "numpy 64"):
        folder = tmp_path / kind
        folder.mkdir()
        path = write_kind(kind, folder / "a", documents)
        cache = open_tokens(folder, "tokens", path)
        samples = CachedSamples(cache, 33, seed=3)
        orders.append([samples.read(i).tokens.tolist() for i in range(40)])
        content = cache.content
    assert all(order == orders[0] for order in orders)
    changed = write_kind("numpy", tmp_path / "other", [*documents[:-1], [1, EOS]])
    assert open_tokens(tmp_path, "tokens", changed).content != content


def test_each_file_is_opened_once_however_many_there_are(tmp_path: Path, monkeypatch) -> None:
    opened: list[str] = []
    really = open

    def note(path: Any, *rest: Any, **options: Any) -> Any:
        opened.append(str(path))
        return really(path, *rest, **options)

    for number in range(6):  # longer than a pointer of Git LFS, for which shorter ones are opened
        write_kind("numpy", tmp_path / f"a{number}", DOCUMENTS * 99)
    monkeypatch.setattr("builtins.open", note)
    open_tokens(tmp_path, "tokens", tmp_path / "*.npy")
    assert sorted(path for path in opened if path.endswith(".npy")) == [
        str(tmp_path / f"a{number}.npy") for number in range(6)
    ]


def test_a_file_that_has_changed_is_not_accepted_by_another_start(tmp_path: Path) -> None:
    path = write_kind("numpy", tmp_path / "a", DOCUMENTS)
    cache, good, stat = open_tokens(tmp_path, "tokens", path), path.read_bytes(), path.stat()
    path.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for _ in range(2):
        what = "a.npy: has changed since it was indexed: damaged at byte 128\n  fix: restore"
        with pytest.raises(ConfigError, match=what):
            documents_of(open_tokens(tmp_path, "tokens", path))
        with pytest.raises(ConfigError, match="a.npy: has changed since it was indexed"):
            open_tokens(tmp_path, "tokens", path, check_all=True)
    path.write_bytes(good[:-2])
    with pytest.raises(Exception, match=r"a\.npy has \d+ of \d+ B"):
        TokenCache(cache.folder)
    path.write_bytes(good)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = open_tokens(tmp_path, "tokens", path, check_all=True)
    assert documents_of(again) == DOCUMENTS
    assert again.content == cache.content


@pytest.mark.parametrize(
    ("message", "suffix", "place", "content"),
    [
        ("no index of Megatron's", ".idx", slice(0, 1), b"\0"),
        ("type 7, not 1 and 4, 5 or 8", ".idx", slice(17, 18), b"\7"),
        ("cut short", ".idx", slice(-8, None), b""),
        ("of a different file", ".idx", slice(34, 35), b"\4"),  # tokens of the first sequence
        ("of a different file", ".bin", slice(2, None), b""),
        ("not its sequences", ".idx", slice(-8, None), (1).to_bytes(8, "little")),
    ],
)
def test_a_damaged_index_is_refused(message, suffix, place, content, tmp_path: Path) -> None:
    # the files of a checkout may be read-only
    shutil.copytree(MEGATRON, tmp_path / "data", copy_function=shutil.copyfile)
    file = tmp_path / "data" / f"small{suffix}"
    damaged = bytearray(file.read_bytes())
    damaged[place] = content
    file.write_bytes(damaged)
    with pytest.raises(ConfigError, match=message) as error:
        open_tokens(tmp_path, "megatron", tmp_path / "data" / "small.bin")
    assert error.value.key == "training.dataset_path"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        # read as uint16, every id would be followed by a 0 that is no token of the text
        ({"a.bin": flat(5 * DOCUMENTS, "<u4")}, r"a\.bin: every second token is 0: .* than uint16"),
        ({"a.npy": flat([[1, 2, 258, EOS]])}, "token 2 has id 258, and the tokenizer has 258"),
        ({"a.npy": np.array([1, -100, EOS])}, "token 1 has id 18446744073709551516"),
        (
            {"a.npy": flat(DOCUMENTS), "b.npy": flat(DOCUMENTS, "<u4")},
            r"b\.npy: is of type <u4, and .*a\.npy of <u2",
        ),
        ({"a.npy": np.zeros(4)}, "<f8"),
        ({"a.npy": np.zeros((2, 2), np.uint16)}, r"shape \(2, 2\)"),
    ],
)
def test_arrays_that_are_no_tokens_are_refused(arrays, message: str, tmp_path: Path) -> None:
    for name, array in arrays.items():
        with open(tmp_path / name, "wb") as file:
            file.write(array.tobytes()) if name == "a.bin" else np.save(file, array)
    with pytest.raises(ConfigError, match=message):
        open_tokens(tmp_path, "tokens", tmp_path / f"*{Path(name).suffix}")


@pytest.mark.parametrize("kind", ["numpy", "llm.c"])
def test_a_file_is_as_long_as_its_header_says(kind: str, tmp_path: Path) -> None:
    path = write_kind(kind, tmp_path / "a", DOCUMENTS)
    path.write_bytes(path.read_bytes() + b"\n")  # half a token
    with pytest.raises(ConfigError, match=r"has [\d,]+ bytes, and its header says [\d,]+"):
        open_tokens(tmp_path, "tokens", path)


@pytest.mark.parametrize("kind", ["numpy", "llm.c", "datatrove"])
def test_zeros_between_tokens_are_tokens_where_the_type_is_known(kind: str, tmp_path: Path) -> None:
    path = write_kind(kind, tmp_path / "a", 40 * [[104, 0, EOS, 0]])
    assert open_tokens(tmp_path, "tokens", path).num_tokens == 160


@pytest.mark.parametrize(
    ("ends", "message"),
    [([2, 1], "do not follow"), ([5], "of a different file"), ([], "cut short")],
)
def test_a_wrong_index_of_datatrove_is_refused(ends: list[int], message: str, tmp_path) -> None:
    path = write_kind("datatrove", tmp_path / "a", DOCUMENTS)
    np.array(ends, "<u8").tofile(f"{path}.index")
    with pytest.raises(ConfigError, match=message):
        open_tokens(tmp_path, "tokens", path)


def test_documents_end_where_they_do_in_every_piece_that_is_read(tmp_path: Path) -> None:
    length = 1000
    document = np.full(length, 104, "<u2")
    document[-1] = EOS
    array = np.tile(document, 3 * CHUNK // (2 * 2 * length))  # one piece and a half
    np.save(tmp_path / "a.npy", array)
    cache = open_tokens(tmp_path, "tokens", tmp_path / "a.npy")
    assert cache.num_tokens * array.itemsize > CHUNK
    assert {*cache.lengths(0).tolist()} == {length}
    array[CHUNK // 2 + 5] = 258
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ConfigError, match=f"token {CHUNK // 2 + 5} has id 258"):
        open_tokens(tmp_path / "again", "tokens", tmp_path / "a.npy")


def test_what_resolving_says(tmp_path: Path) -> None:
    write_kind("nanoGPT", tmp_path / "a", DOCUMENTS)

    def check(dataset: str, **keys: object) -> None:
        source = entry(dataset, dataset_path=str(tmp_path), **keys)
        check_path(source, find_dataset(dataset))
        check_files(source)

    check("tokens")
    with pytest.raises(ConfigError, match="there is no .*a.idx"):
        check("megatron")
    with pytest.raises(ConfigError, match="read where they lie"):
        check("tokens", dataset_mode="streamed")


def test_a_long_header_is_read_whole(tmp_path: Path) -> None:
    words = b"{'descr': '<u2', 'fortran_order': False, 'shape': (3,), }".ljust(4085) + b"\n"
    file = tmp_path / "tokens.npy"
    content = b"\x93NUMPY\x01\x00" + len(words).to_bytes(2, "little") + words
    file.write_bytes(content + np.array([1, 2, 3], np.uint16).tobytes())
    found = open_array(stat(str(file)), "<u2")
    assert (found.num_tokens, found.offset) == (3, len(content))
