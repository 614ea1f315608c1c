"""Files in object storage: the same batches as from the disk, whatever a server does meanwhile."""

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry as fsspec_registry

from meshwright.datasets import storage
from meshwright.datasets.block_cache import BlockCache
from meshwright.datasets.data_file import ChangedError
from meshwright.datasets.files import local_files
from meshwright.datasets.ranges import RangeFile, open_file
from meshwright.datasets.rows import LocalDocuments
from meshwright.datasets.samples import CachedSamples, SampleRules
from meshwright.datasets.shards import StreamedSource
from meshwright.datasets.storage import look, stat
from meshwright.datasets.stream import Cursor, SampleStream
from meshwright.datasets.token_cache.cache import TokenCache
from meshwright.datasets.token_cache.tokenizing import open_cache
from meshwright.system import retries
from meshwright.system.errors import ConfigError, StorageError
from tests.helpers.server import Server
from tests.helpers.texts import entry, tokenization

EOS = 257


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(retries, "RETRY_AFTER_S", (0.0,) * 6)
    monkeypatch.setattr(storage, "TIMEOUT_S", 0.5)
    server = Server()
    yield server
    server.close()


def documents() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[*rng.integers(0, 256, n).tolist(), EOS] for n in rng.integers(1, 2000, 150)]


def save(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    flat = [token for document in documents() for token in document]
    np.save(folder / "a.npy", np.array(flat, "<u2"))
    return folder / "a.npy"


def open_tokens(folder: Path, path: str, blocks: BlockCache | None = None) -> TokenCache:
    spec = tokenization(dataset="tokens", dataset_path=path)
    return open_cache(spec, folder, num_workers=1, blocks=blocks)


def batches(cache: TokenCache) -> np.ndarray:
    samples = CachedSamples(cache, 513, seed=1)
    return np.stack([samples.read(n).tokens for n in range(samples.samples_per_epoch)])


def some_faults(seed: int) -> Iterator[str]:
    """Of five requests three go wrong, and never more in a row than are tried again."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(["503", "reset", "short", "", ""], 5)


@pytest.mark.parametrize("keeps_blocks", [False, True])
def test_batches_are_those_of_the_disk_to_the_bit(server, tmp_path, keeps_blocks) -> None:
    path = save(tmp_path / "disk")
    server.files["a.npy"] = path.read_bytes()
    on_disk = open_tokens(tmp_path / "1", str(path))
    server.faults = some_faults(seed=3)
    blocks = BlockCache(tmp_path / "blocks", 1 << 30) if keeps_blocks else None
    cache = open_tokens(tmp_path / "2", f"{server.address}/a.npy", blocks)
    assert cache.content == on_disk.content
    assert np.array_equal(batches(cache), batches(on_disk))
    if keeps_blocks:
        before = server.num_requests
        again = TokenCache(cache.folder, blocks=blocks)
        assert np.array_equal(batches(again), batches(on_disk))
        assert server.num_requests == before


FAULTS = ["503", "reset", "short"]


@pytest.mark.parametrize("fault", [*FAULTS, "slow"])
def test_a_fault_that_passes_is_waited_for(server, tmp_path, fault) -> None:
    server.files["a"] = bytes(range(256))
    server.faults = iter([fault, fault])
    assert RangeFile(f"{server.address}/a").read(3, 5) == bytes(range(3, 8))
    assert server.num_requests == 3


@pytest.mark.parametrize(
    ("fault", "asked", "error", "says"),
    [
        *((one, 7, StorageError, "/a cannot be read: .*\n  fix: run") for one in FAULTS),
        ("whole", 1, ConfigError, "gives no ranges"),
    ],
)
def test_a_fault_that_stays_says_so(server, fault, asked, error, says) -> None:
    server.files["a"] = bytes(256)
    server.faults = iter([fault] * 7)
    with pytest.raises(error, match=says):
        RangeFile(f"{server.address}/a").read(3, 5)
    assert server.num_requests == asked


def test_spaces_and_umlauts_are_sent_as_browsers_do(server) -> None:
    server.files["a%20b/%C3%BC.npy"] = b"12345"
    for name in ("a b/ü.npy", "a%20b/%C3%BC.npy"):
        assert RangeFile(f"{server.address}/{name}").read(1, 3) == b"234"


def test_a_missing_file_is_an_answer(server) -> None:
    with pytest.raises(FileNotFoundError):
        RangeFile(f"{server.address}/none").read(0, 5)
    assert server.num_requests == 1


def test_content_that_changes_under_the_job_is_said_to_have_changed(server, tmp_path) -> None:
    path = save(tmp_path / "disk")
    server.files["a.npy"] = content = path.read_bytes()
    address = f"{server.address}/a.npy"
    cache = open_tokens(tmp_path / "cache", address)
    server.files["a.npy"] = content[:-2] + b"\x00\x00"
    with pytest.raises(ConfigError, match="a.npy: has changed since it was indexed"):
        batches(cache)
    # another start takes it for other data, which no checkpoint of before fits
    assert open_tokens(tmp_path / "cache", address).content != cache.content


def test_an_index_that_changes_while_it_is_read_is_noticed(server) -> None:
    server.files["a"] = bytes(100)
    file = RangeFile(f"{server.address}/a")
    file.read(0, 50)
    server.files["a"] = bytes(99) + b"1"
    with pytest.raises(ChangedError, match="/a: has changed"):
        file.read(50, 50)


def test_a_damaged_block_of_the_local_cache_is_read_again(server, tmp_path) -> None:
    path = save(tmp_path / "disk")
    server.files["a.npy"] = path.read_bytes()
    blocks = BlockCache(tmp_path / "blocks", 1 << 30)
    cache = open_tokens(tmp_path / "cache", f"{server.address}/a.npy", blocks)
    want = batches(cache)
    [block, *_] = sorted(blocks.folder.glob("??/*-0"))
    block.write_bytes(bytes(block.stat().st_size))
    assert np.array_equal(batches(TokenCache(cache.folder, blocks=blocks)), want)
    assert block.read_bytes() == server.files["a.npy"][: len(block.read_bytes())]


def test_a_block_that_cannot_be_deleted_is_read_from_its_storage(server, tmp_path) -> None:
    """As another user's, in a folder that users share; here a folder has its name."""
    server.files["a"] = bytes(1000)
    blocks = BlockCache(tmp_path / "blocks", 0)  # each write is one too many
    file = RangeFile(f"{server.address}/a", cache=blocks)
    assert file.read(0, 1000) == bytes(1000)
    block = blocks._place(file, 0)
    block.mkdir(parents=True)
    assert file.read(0, 1000) == file.read_again(0, 1000) == bytes(1000)
    assert block.is_dir()


def test_the_local_cache_is_bounded(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(BlockCache, "BLOCK", 1 << 10)
    server.files["a"] = random.Random(0).randbytes(100 << 10)
    blocks = BlockCache(tmp_path / "blocks", 32 << 10)
    file = RangeFile(f"{server.address}/a", cache=blocks)
    for begin in range(0, 100 << 10, 1000):
        assert file.read(begin, 1000) == server.files["a"][begin : begin + 1000]
        # a sixteenth is written between two looks at the sum
        size = sum(path.stat().st_size for path in blocks.folder.glob("??/*"))
        assert size <= (32 + 2) << 10
    assert size > 16 << 10


def test_lines_of_json_are_tokenised_as_from_the_disk(server, tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    texts = (f"document {number} " * (number % 9) for number in range(300))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    server.files["a.jsonl"] = path.read_bytes()
    server.faults = some_faults(seed=5)
    caches = []
    for place in (str(path), f"{server.address}/a.jsonl"):
        spec = tokenization(dataset="json", dataset_path=place)
        caches.append(open_cache(spec, tmp_path / "cache", num_workers=1))
    assert caches[0].folder != caches[1].folder
    assert caches[0].content == caches[1].content


def test_a_fault_that_stays_is_waited_for_once_in_a_stream_of_documents(server) -> None:
    """By the read of the bytes, and not again by the shard whose window they are of."""
    server.files["a.jsonl"] = b'{"text": "some words"}\n' * 100
    path = f"{server.address}/a.jsonl"
    spec = tokenization(dataset="json", dataset_path=path)
    documents = LocalDocuments(spec.entry, [stat(path)])
    source = StreamedSource(spec.entry, documents, spec.encoder(), num_shards=1, window=10)
    rules = SampleRules(length=8, seed=1)
    stream = SampleStream([source], Cursor(), rules, batch=1, slots=[0])
    asked, server.faults = server.num_requests, itertools.repeat("503")
    with pytest.raises(StorageError, match=r"a\.jsonl cannot be read: HTTP Error 503"):
        stream.next_sample()
    assert server.num_requests - asked == 7


def test_a_stream_can_be_sought_in_and_notices_a_change(server) -> None:
    server.files["a"] = content = random.Random(0).randbytes(1 << 16)
    with open_file(stat(f"{server.address}/a")) as stream:
        stream.seek(100)
        assert stream.read(10) == content[100:110]
        stream.seek(-5, 2)
        assert stream.read() == content[-5:]
    stream = open_file(stat(f"{server.address}/a"))
    server.files["a"] = content[:-1]
    with pytest.raises(ChangedError, match="has changed"):
        stream.read()


class Bucket(MemoryFileSystem):
    """In place of s3: fsspec's file system in memory, with failures of a connection."""

    protocol = "s3"
    store: dict[str, Any] = {}  # noqa: RUF012  fsspec's own declaration
    pseudo_dirs = [""]  # noqa: RUF012
    failures: list[Exception] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("s3://", "memory://"))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found = super().info(path, **options)
        content = self.store.get(self._strip_protocol(path))
        return found if content is None else found | {"ETag": f"{hash(content.getvalue())}"}

    def cat_file(self, path: str, **options: Any) -> bytes:
        if self.failures:
            raise self.failures.pop()
        return super().cat_file(path, **options)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr(retries, "RETRY_AFTER_S", (0.0,) * 6)
    fsspec.register_implementation("s3", Bucket, clobber=True)
    yield Bucket()
    Bucket.store.clear()
    fsspec_registry.pop("s3")


def test_a_folder_of_a_bucket_gives_the_batches_of_the_disk(bucket, tmp_path) -> None:
    path = save(tmp_path / "disk")
    (tmp_path / "disk" / "b.npy").write_bytes(path.read_bytes())
    for name in ("a.npy", "b.npy", "_hidden.npy", "b.txt"):
        bucket.pipe_file(f"s3://bucket/data/{name}", path.read_bytes())
    on_disk = open_tokens(tmp_path / "1", str(tmp_path / "disk"))
    bucket.failures += [ConnectionResetError("reset"), TimeoutError("slow")]
    cache = open_tokens(tmp_path / "2", "s3://bucket/data")
    assert cache.content == on_disk.content
    assert np.array_equal(batches(cache), batches(on_disk))
    glob = open_tokens(tmp_path / "3", "s3://bucket/data/*.npy")
    assert glob.num_tokens == cache.num_tokens * 3 // 2  # a glob means what it says


def test_a_file_of_a_bucket_that_changes_is_noticed(bucket) -> None:
    path = "s3://bucket/a"
    bucket.pipe_file(path, bytes(100))
    stamp = look(path).stamp
    assert RangeFile(path, stamp).read(0, 50) == bytes(50)
    bucket.pipe_file(path, bytes(101))
    with pytest.raises(ChangedError, match="/a: has changed"):
        RangeFile(path, stamp).read(0, 50)


@pytest.mark.parametrize("address", ["{server}/none.jsonl", "s3://bucket/none", "s3://bucket/*.x"])
def test_an_address_without_a_file_is_named(server, bucket, address) -> None:
    path = address.format(server=server.address)
    said = f"training.dataset_path = {path!r}: no such file or folder\n  fix: check the address"
    with pytest.raises(ConfigError, match=f"{re.escape(said)}$"):
        local_files(entry(dataset="json", dataset_path=path))


def test_a_bucket_needs_its_package(monkeypatch) -> None:

    def missing(scheme: str) -> None:
        raise ImportError(f"Install s3fs to access {scheme}")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(ConfigError, match="s3:// needs a package .*\n  fix: Install s3fs"):
        storage.find_files("s3://bucket/data", (".npy",))


def test_an_unknown_storage_is_named(monkeypatch) -> None:
    with pytest.raises(ConfigError, match="nowhere:// is no storage"):
        storage.find_files("nowhere://bucket/data", (".npy",))
    ftp = Mock(side_effect=TypeError("missing 1 required positional argument: 'host'"))
    monkeypatch.setattr(fsspec, "filesystem", ftp)
    with pytest.raises(ConfigError, match="ftp:// is no storage"):
        storage.find_files("ftp://host/data", (".npy",))


def test_a_web_server_lists_no_files(server) -> None:
    with pytest.raises(ConfigError, match="does not list files"):
        storage.find_files(server.address, (".npy",))
