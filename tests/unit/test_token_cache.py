"""Tokens are written once and read back as they were, or not at all."""

import errno
import gc
import json
import os
import random
import resource
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from meshwright.config.loader import load_config
from meshwright.config.section import BYTES
from meshwright.datasets import identity
from meshwright.datasets.conversations import Conversation
from meshwright.datasets.encoding import NO_LOSS
from meshwright.datasets.opening import find_data, open_data
from meshwright.datasets.ranges import DESCRIPTORS, RangeFile
from meshwright.datasets.recipe import TokenizationSpec
from meshwright.datasets.rows import IndexedDocuments
from meshwright.datasets.samples import CachedSamples
from meshwright.datasets.token_cache import tokenizing
from meshwright.datasets.token_cache.cache import Part, TokenCache
from meshwright.datasets.token_cache.tokenizing import open_cache
from meshwright.system.errors import ConfigError
from meshwright.system.files import whole_file
from tests.helpers.files import NOT_THERE, failing_reads, leave_out_flock_and_fsync, tree
from tests.helpers.texts import OWN_DATASET, TEXTS, TextsRecipe, encode, entry, tokenization
from tests.helpers.tokenizer_files import byte_level_json

MANY = tuple(f"document {i} " * (i % 7) for i in range(300))


def documents_of(cache: TokenCache) -> list[list[int]]:
    found = []
    for block in range(len(cache.block_starts) - 1):
        begin = int(cache.block_starts[block])
        for length in cache.lengths(block).tolist():
            found.append(cache.tokens(begin, begin + length).tolist())
            begin += length
    return found


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    for module in ("token_cache.cache", "token_cache.writing"):
        monkeypatch.setattr(f"meshwright.datasets.{module}.BLOCK_DOCUMENTS", 4)
    for module in ("foreign_tokens", "token_cache.cache", "token_cache.writing", "token_parts"):
        monkeypatch.setattr(f"meshwright.datasets.{module}.BLOCK_BYTES", 64)


@pytest.mark.parametrize("texts", [TEXTS, MANY])
def test_every_document_is_there_in_order(texts, tmp_path, small_blocks) -> None:
    cache = open_cache(TextsRecipe(texts), tmp_path, num_workers=1)
    assert documents_of(cache) == [encode(text) for text in texts if text]
    assert cache.num_tokens == sum(len(encode(text)) for text in texts)
    assert cache.num_documents == sum(bool(text) for text in texts)
    assert cache.num_bytes == sum(map(len, texts))


@pytest.mark.parametrize("number", [0, 3, 150, 255])
@pytest.mark.parametrize("change", ["other", "longer", "absent"])
def test_the_first_other_document_is_found_by_checksums(
    number, change, tmp_path, small_blocks, monkeypatch
) -> None:
    """Of caches of many parts, reading little more than the block that differs."""
    read = list[int]()
    monkeypatch.setattr("meshwright.datasets.token_cache.cache.PIECE_TOKENS", 64)
    texts = [text for text in MANY if text]
    a = open_cache(TextsRecipe(tuple(texts)), tmp_path / "a", num_workers=1)
    old = texts[number]
    texts[number] = {"other": old.swapcase(), "longer": f"{old} more", "absent": ""}[change]
    b = open_cache(TextsRecipe(tuple(texts)), tmp_path / "b", num_workers=1)
    tokens = TokenCache.tokens

    def counted(self: TokenCache, begin: int, end: int) -> object:
        read.append(end - begin)
        return tokens(self, begin, end)

    monkeypatch.setattr(TokenCache, "tokens", counted)
    assert a.first_other_document(b) == b.first_other_document(a) == number
    assert sum(read) <= 2 * 2 * 4 * 64
    assert a.first_other_document(a) == a.num_documents


def test_a_dataset_of_the_users_is_read_anew_when_its_code_has_changed(tmp_path) -> None:
    module = tmp_path / "own.py"
    recipe = TokenizationSpec(entry("own"), BYTES, custom_import=str(module))
    for text in ("before", "after", "before"):
        module.write_text(OWN_DATASET.format(text))
        cache = open_cache(recipe, tmp_path / "cache", num_workers=1)
        assert documents_of(cache) == [[256, *text.encode(), 257]]


def test_any_number_of_processes_makes_the_same_cache(tmp_path) -> None:
    """Without a lock that a Ctrl-C would leave behind."""
    with patch("multiprocessing.resource_tracker.register", side_effect=AssertionError):
        caches = [
            open_cache(TextsRecipe(MANY), tmp_path / str(number), num_workers=number)
            for number in (1, 2)
        ]
    assert caches[0].content == caches[1].content
    assert documents_of(caches[0]) == documents_of(caches[1])


BAD = """
import multiprocessing, time
from meshwright.datasets.opening import find_data, open_data
from meshwright.datasets.rows import IndexedDocuments
from meshwright.datasets.sources import DatasetSpec


def get(index):
    if multiprocessing.parent_process() is None:
        time.sleep(0.01)  # the others come first
        return "text"
    time.sleep(0.5)
    raise ValueError("x" * 1_000_000)


DATASETS = {"own": DatasetSpec(lambda *_: IndexedDocuments(4000, get), lambda entry: [])}
"""


@pytest.mark.slow
def test_long_errors_of_several_processes_end_all(tmp_path) -> None:
    """A process would wait for ever for someone to read the second one."""
    (tmp_path / "own.py").write_text(BAD)
    recipe = TokenizationSpec(entry("own"), BYTES, custom_import=str(tmp_path / "own.py"))
    with pytest.raises(ConfigError, match=r"own document \d+: ValueError: x+ \(.*own.py:\d+\)"):
        open_cache(recipe, tmp_path / "cache", num_workers=3)


def test_what_is_there_is_not_made_again(tmp_path) -> None:
    note = tmp_path / "opened"
    recipe = TextsRecipe(MANY, opened_note=str(note))
    open_cache(recipe, tmp_path, num_workers=1)
    opened = note.read_text()
    open_cache(recipe, tmp_path, num_workers=1)
    assert note.read_text() == opened


def test_finished_parts_of_an_interrupted_run_are_kept(tmp_path, caplog) -> None:
    caplog.set_level("INFO", "meshwright")
    recipe = TextsRecipe(MANY)
    whole = open_cache(recipe, tmp_path, num_workers=1)
    want = documents_of(whole)
    (whole.folder / "cache.npz").unlink()  # as if stopped before the end,
    (whole.folder / "00003.npz").unlink()  # and in a part
    killed = subprocess.Popen(["sleep", "0"])
    killed.wait()
    with patch("os.getpid", return_value=killed.pid):
        left_over = unfinished_of(whole.folder / "00005.tokens")
    left_over.write_bytes(b"half")
    times = {path.name: path.stat().st_mtime_ns for path in whole.folder.glob("*.tokens")}
    again = open_cache(recipe, tmp_path, num_workers=1)
    changed = [
        path.name
        for path in whole.folder.glob("*.tokens")
        if path.stat().st_mtime_ns != times[path.name]
    ]
    assert changed == ["00003.tokens"]
    assert "1 process, 7 of 8 parts are there" in caplog.text
    assert not left_over.exists()
    assert documents_of(again) == want
    assert again.content == whole.content


class ManyPartsRecipe(TextsRecipe):
    def open(self, streamed: bool) -> IndexedDocuments:
        documents = super().open(streamed)
        documents.parts = len(self.texts)
        return documents


def test_a_cache_of_many_parts_needs_no_descriptor_for_each(tmp_path) -> None:
    """Under a limit that a descriptor per part would break many times over."""
    texts = MANY[:150]
    recipe, soft = ManyPartsRecipe(texts), resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # files that earlier tests left open would be closed in between
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + DESCRIPTORS + 10, soft[1]))
    try:
        cache = open_cache(recipe, tmp_path, num_workers=1)
        assert len(list(cache.folder.glob("*.tokens"))) == 150 > 2 * DESCRIPTORS
        assert documents_of(cache) == [encode(text) for text in texts if text]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, soft)


def test_a_file_that_is_cut_short_under_a_reader_is_damage_and_no_signal(tmp_path) -> None:
    """Mapped, its missing pages would end the process by SIGBUS."""
    for is_checked in (False, True):
        cache = open_cache(TextsRecipe(MANY), tmp_path / str(is_checked), num_workers=1)
        if is_checked:
            assert cache.tokens(0, 5).tolist() == encode(MANY[1])[:5]
        os.truncate(cache.folder / "00000.tokens", 2)
        with pytest.raises(ConfigError, match="damaged at byte 0"):
            cache.tokens(0, 5)


def test_another_chat_template_is_another_cache(tmp_path) -> None:
    template, identities = tmp_path / "chat_template.jinja", set()
    (tmp_path / "a.txt").write_text("text")
    source = entry("text", dataset_path=str(tmp_path / "a.txt"))
    recipe = TokenizationSpec(source, BYTES, str(template))
    for content in ("{{ messages }}", "{{ messages[0] }}"):
        template.write_text(content)
        identities.add(recipe.id)
    assert len(identities) == 2
    # another token by a name that the template writes
    byte_level_json(tmp_path / "tokenizer.json", ["<s>", "</s>", "<end>"])
    for eos in ("</s>", "<end>", "<s>"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        for content in ("{{ messages }}", "{{ eos_token }}"):
            template.write_text(content)
            identities.add(replace(recipe, tokenizer_path=str(tmp_path)).id)
    assert len(identities) == 6


def read_all(cache: TokenCache) -> np.ndarray:
    samples = CachedSamples(cache, 64, seed=0)
    return np.stack([samples.read(n).tokens for n in range(samples.samples_per_epoch)])


@pytest.mark.parametrize("check_all", [False, True])
def test_no_flipped_bit_goes_unnoticed(check_all, tmp_path) -> None:
    """One bit of each file in turn: noticed when opened or when read, then made anew.

    Of an index several, as an .npz has directories of its own, where one may hide an array.
    """
    recipe, rng = TextsRecipe(MANY), random.Random(0)
    cache = open_cache(recipe, tmp_path / "good", num_workers=1)
    want = read_all(cache)
    files = sorted(path.name for path in cache.folder.iterdir() if path.stat().st_size)
    assert len(files) == 2 * 8 + 2
    noticed_when_read = 0
    for name in (*files, *["cache.npz", "00000.npz"] * 8):
        folder = tmp_path / "bad" / cache.folder.name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(cache.folder, folder)
        content = bytearray((folder / name).read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (folder / name).write_bytes(content)
        try:
            got = read_all(open_cache(recipe, tmp_path / "bad", num_workers=1, check_all=check_all))
        except ConfigError:
            assert not check_all
            noticed_when_read += 1
            got = read_all(open_cache(recipe, tmp_path / "bad", num_workers=1))
        assert np.array_equal(got, want), name
    assert check_all or noticed_when_read >= 8  # every file of tokens


@pytest.mark.parametrize("name", ["00002.tokens", "00002.npz", "lengths", "cache.npz"])
@pytest.mark.parametrize("damage", ["shorter", "gone", "longer", "empty"])
def test_half_written_files_are_made_again(name, damage, tmp_path, caplog) -> None:
    recipe = TextsRecipe(MANY)
    cache = open_cache(recipe, tmp_path, num_workers=1)
    want, path = read_all(cache), cache.folder / name
    if damage == "gone":
        path.unlink()
    else:
        size = path.stat().st_size
        os.truncate(path, {"shorter": size // 2, "longer": size + 4, "empty": 0}[damage])
    for _ in range(2):  # the second time if it is noticed only when read
        try:
            got = read_all(open_cache(recipe, tmp_path, num_workers=1))
        except ConfigError:
            continue
    assert np.array_equal(got, want)


@pytest.mark.parametrize("texts", [(), ("", "")])
def test_no_text_at_all(texts, tmp_path) -> None:
    with pytest.raises(ConfigError, match="training.dataset = 'texts': holds no text\n  fix: "):
        open_cache(TextsRecipe(texts), tmp_path, num_workers=1)


def test_no_room_for_tokens() -> None:
    with pytest.raises(ConfigError, match="(?s)/proc/no: No such file.*fix: make room"):
        open_cache(TextsRecipe(), Path("/proc/no"), num_workers=1)


def test_texts_and_conversations_do_not_mix(tmp_path) -> None:
    conversation = Conversation([{"role": "user", "content": "hello"}])
    with pytest.raises(ConfigError, match="text and conversations"):
        open_cache(TextsRecipe(("text", conversation)), tmp_path, num_workers=1)


def test_a_token_keeps_whether_the_loss_counts_it(tmp_path) -> None:
    turns = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}]
    nothing = ("",) * 8  # parts of which a condition leaves nothing do not tell the kind
    cache = open_cache(TextsRecipe((*nothing, turns, turns)), tmp_path, num_workers=1)
    sample = CachedSamples(cache, 18, seed=0).read(0)
    assert bytes(sample.tokens.tolist()) == b"askanswer" * 2
    assert (sample.raw < NO_LOSS).tolist() == ([False] * 3 + [True] * 6) * 2
    assert sample.documents.tolist() == [0] * 9 + [1] * 9


def test_large_vocabularies_need_four_bytes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("meshwright.datasets.tokenizers.kinds.ByteTokenizer.vocab_size", 1 << 17)
    cache = open_cache(TextsRecipe(MANY), tmp_path, num_workers=1)
    assert documents_of(cache) == [encode(text) for text in MANY if text]
    assert (cache.folder / "00000.tokens").stat().st_size % 4 == 0
    assert cache.tokens(0, 1).dtype == np.uint32


def test_a_cache_of_someone_else_that_is_damaged(tmp_path, monkeypatch) -> None:
    cache = open_cache(TextsRecipe(MANY), tmp_path, num_workers=1)
    path = cache.folder / "00000.tokens"
    path.write_bytes(bytes(path.stat().st_size))
    with (
        failing_reads("damaged", errno.EROFS, 9),
        pytest.raises(ConfigError, match="damaged at byte 0\n  fix: delete"),
    ):
        read_all(TokenCache(cache.folder))


def test_a_process_opens_what_is_there_now(tmp_path) -> None:
    """Not what was behind the same path before."""
    (tmp_path / "a.txt").write_text("first text")
    keys = {"dataset": "text", "dataset_path": str(tmp_path / "a.txt")}
    first = open_cache(tokenization(**keys), tmp_path / "cache", num_workers=1)
    stat = (tmp_path / "a.txt").stat()
    (tmp_path / "a.txt").write_text("a different one")
    os.utime(tmp_path / "a.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as rsync does
    second = open_cache(tokenization(**keys), tmp_path / "cache", num_workers=1)
    assert documents_of(first) == [encode("first text")]
    assert documents_of(second) == [encode("a different one")]


def test_two_processes_make_each_part_once(tmp_path, monkeypatch) -> None:
    """Threads here, each with leases of its own: as processes, they wait for no lock."""
    made = list[int]()
    real = tokenizing.write_part

    def slow(recipe: TokenizationSpec, part: Part, *rest: object) -> None:
        made.append(part.number)
        time.sleep(0.1)
        real(recipe, part, *rest)

    monkeypatch.setattr(tokenizing, "write_part", slow)
    with ThreadPoolExecutor(2) as threads:
        opening = [
            threads.submit(open_cache, TextsRecipe(MANY), tmp_path, num_workers=1) for _ in range(2)
        ]
        caches = [future.result() for future in opening]
    assert sorted(made) == list(range(8))
    assert documents_of(caches[0]) == documents_of(caches[1])
    assert not list(caches[0].folder.glob("*.lease"))


def unfinished_of(path: Path) -> Path:
    """The name of a file of this process that is being written."""
    before = set(path.parent.iterdir())
    with suppress(KeyboardInterrupt), whole_file(path):
        [unfinished] = set(path.parent.iterdir()) - before
        raise KeyboardInterrupt
    return unfinished


def test_only_what_is_surely_dead_is_removed(tmp_path) -> None:
    """Another machine's files are not, whatever their number, nor whatever the clocks say."""
    folder = open_cache(TextsRecipe(TEXTS), tmp_path, num_workers=1).folder
    (folder / "00001.npz").unlink()  # so that it is made again
    other = []
    for number, age_s in enumerate((0, 3600, -7200, 90_000)):  # of the last the process is gone
        with patch("meshwright.system.files.this_machine", return_value="elsewhere"):
            other.append(unfinished_of(folder / f"0000{number}.tokens"))
        other[-1].write_bytes(b"half")
        os.utime(other[-1], (time.time() - age_s,) * 2)
    mine = unfinished_of(folder / "00001.tokens")
    mine.write_bytes(b"half")
    (folder / "cache.npz").unlink()
    open_cache(TextsRecipe(TEXTS), tmp_path, num_workers=1)
    assert sorted(folder.glob("*.unfinished")) == sorted([*other[:3], mine])


def wrong_in_memory(monkeypatch, name: str, position: int) -> None:
    """The system's memory of a file has a wrong bit; the disk has not."""
    real = RangeFile.read

    def read(self: RangeFile, begin: int, size: int) -> bytes:
        content = bytearray(real(self, begin, size))
        if Path(self.path).name == name and begin <= position < begin + len(content):
            content[position - begin] ^= 1
        return bytes(content)

    monkeypatch.setattr(RangeFile, "read", read)


@pytest.mark.parametrize("name", ["00000.tokens", "lengths"])
def test_a_wrong_bit_in_one_jobs_memory_costs_nobody_the_cache(
    name, tmp_path, monkeypatch, caplog
) -> None:
    cache = open_cache(TextsRecipe(MANY), tmp_path, num_workers=1)
    want, before = read_all(cache), tree(cache.folder)
    wrong_in_memory(monkeypatch, name, 5)
    assert np.array_equal(read_all(TokenCache(cache.folder)), want)
    assert "were wrong in memory, and are right on the disk" in caplog.text
    assert tree(cache.folder) == before


@pytest.mark.parametrize("name", ["00000.tokens", "00000.npz", "lengths"])
def test_damage_on_the_disk_is_noted_and_the_next_start_acts(name, tmp_path) -> None:
    cache = open_cache(TextsRecipe(MANY), tmp_path, num_workers=1)
    want, before, path = read_all(cache), tree(cache.folder), cache.folder / name
    good = path.read_bytes()
    path.write_bytes(b"XXXX" + good[4:])
    with pytest.raises(ConfigError, match="damaged.*\n  fix: run the same command again"):
        read_all(TokenCache(cache.folder))
    assert tree(cache.folder) == before | {"damaged"}  # others still read all other parts
    path.write_bytes(good)  # it was not the disk after all: nothing is made again
    times = {file.name: file.stat().st_mtime_ns for file in cache.folder.glob("*.tokens")}
    (cache.folder / "damaged").write_text("0\n")
    assert np.array_equal(read_all(open_cache(TextsRecipe(MANY), tmp_path, num_workers=1)), want)
    assert times == {file.name: file.stat().st_mtime_ns for file in cache.folder.glob("*.tokens")}
    assert tree(cache.folder) == before


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch) -> None:
    """Else a power cut may leave the name, and not the content."""
    flushed, named = dict[int, int](), set[str]()
    fsync, replace = os.fsync, os.replace

    def note_flush(descriptor: int) -> None:
        fsync(descriptor)
        flushed[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def note_name(source: Path, target: Path) -> None:
        assert flushed.get(source.stat().st_ino) == source.stat().st_size, target
        named.add(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(os, "replace", note_name)
    open_cache(TextsRecipe(TEXTS), tmp_path, num_workers=1)
    assert named >= {"00000.tokens", "00000.npz", "lengths", "cache.npz"}


@pytest.mark.parametrize("number", NOT_THERE)
def test_a_file_system_without_flock_or_fsync_holds_a_cache(
    tmp_path, monkeypatch, caplog, number
) -> None:
    leave_out_flock_and_fsync(monkeypatch, number)
    cache = open_cache(TextsRecipe(TEXTS), tmp_path, num_workers=1)
    assert cache.num_tokens == sum(len(encode(text)) for text in TEXTS)
    said = [record.getMessage() for record in caplog.records]
    assert sum("cannot flush a file to the disk" in line for line in said) == 1


def test_a_wrong_bit_in_memory_is_made_good_in_any_block(tmp_path, monkeypatch, small_blocks):
    cache = open_cache(TextsRecipe(MANY), tmp_path, num_workers=1)
    want = cache.tokens(96, 116)  # of the fourth block of 64 bytes

    wrong_in_memory(monkeypatch, "00000.tokens", 200)
    assert np.array_equal(TokenCache(cache.folder).tokens(96, 116), want)


CHAT = """\
{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""


def chat_recipe(folder: Path, lines: list[dict[str, Any]], **keys: Any) -> TokenizationSpec:
    """Of JSON lines in two files, with a template."""
    byte_level_json(folder / "tokenizer.json", ["<s>", "</s>"])
    (folder / "chat_template.jinja").write_text(CHAT)
    for name, some in (("a", lines[::2]), ("b", lines[1::2])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    source = entry(dataset="json", dataset_path=str(folder / "*.jsonl"), **keys)
    return TokenizationSpec(source, str(folder))


TURNS = [{"role": "user", "content": "a", "name": "x"}, {"role": "assistant", "content": "b"}]


def test_what_is_not_used_is_counted_in_the_log(tmp_path: Path, caplog) -> None:
    lines = [{"messages": TURNS, "id": n} | ({"url": "w"} if n % 3 else {}) for n in range(6)]
    recipe = chat_recipe(tmp_path, lines, dataset_format="messages")
    with caplog.at_level("INFO"):
        open_cache(recipe, tmp_path / "c", num_workers=1)
    assert "with the number of each: 'id' (6), 'name' (6), 'url' (4)" in caplog.text


def test_a_part_for_validation_does_not_count_the_same_columns_again(tmp_path, caplog) -> None:
    lines = [
        {"messages": [turn | {"content": str(n)} for turn in TURNS], "id": n} for n in range(9)
    ]
    recipe = chat_recipe(tmp_path, lines, dataset_format="messages")
    with caplog.at_level("INFO"):
        for is_held_out in (False, True):
            side = replace(recipe.entry, held_out=0.5, is_held_out=is_held_out)
            open_cache(replace(recipe, entry=side), tmp_path / "c", num_workers=1)
    assert caplog.text.count("'id' (9)") == 1


def test_what_other_processes_do_not_use_is_counted_too(tmp_path: Path, caplog) -> None:
    chat_recipe(tmp_path, [])
    module = tmp_path / "own.py"
    module.write_text(OWN_DATASET.format(TURNS).replace("IndexedDocuments(1", "IndexedDocuments(9"))
    source = entry(dataset="own")
    recipe = TokenizationSpec(source, str(tmp_path), custom_import=str(module))
    with caplog.at_level("INFO"):
        open_cache(recipe, tmp_path / "c", num_workers=2)
    assert "with the number of each: 'name' (9)" in caplog.text


def test_a_conversation_that_its_template_rejects_is_named_by_file_and_row(tmp_path: Path) -> None:
    lines = [{"messages": TURNS}] * 4 + [{"messages": TURNS[:1]}]
    recipe = chat_recipe(tmp_path, lines, dataset_format="messages")
    with pytest.raises(ConfigError, match="/a.jsonl:3: the conversation has no message whose role"):
        open_cache(recipe, tmp_path / "c", num_workers=1)


@pytest.mark.parametrize("key", ["dataset_format", "dataset_column"])
def test_what_becomes_of_conversations_is_part_of_the_cache(tmp_path, monkeypatch, key) -> None:
    recipe = chat_recipe(tmp_path, [], **{key: "messages"})
    before = recipe.id
    monkeypatch.setattr(identity, "CHATS_VERSION", identity.CHATS_VERSION + 1)
    assert recipe.id != before


def test_a_cache_of_an_earlier_version_is_found_by_its_name(tmp_path, monkeypatch) -> None:
    """Names and contents are those of commit 69d0286a: by other names all data would be tokenized
    again, and with other contents every checkpoint would be rejected."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"document {i} of a few words", "id": i}) for i in range(40)]
    Path("rows.jsonl").write_text("\n".join(lines))
    os.utime("rows.jsonl", ns=(10**18, 10**18))
    recipe = tokenization(dataset="json", dataset_path="rows.jsonl")
    sides = [replace(recipe.entry, held_out=0.3, is_held_out=side) for side in (False, True)]
    found = []
    for spec in (recipe, *(replace(recipe, entry=side) for side in sides)):
        cache = open_cache(spec, tmp_path, num_workers=1)
        found.append((cache.folder.name, cache.content))
    assert found == [
        ("json-c7b02e0cf868569f", "aac42318302c43a0"),
        ("json-bdb4ae5c851fe226", "80da6ce02c3a0a16"),
        ("json-041f58391bb61f74", "33258a319b7d73e3"),
    ]
    words = ["--model.tokenizer_path=bytes", "--training.dataset=json"]
    words += ["--training.dataset_path=rows.jsonl", "--training.dataset_mode=streamed"]
    (stream,) = open_data("training", load_config([*words, "--training.seq_len=64"]))
    hashes = "d9072a01c4b3ab5f, 2999aebf356ab7e8, 3ef775f29e6b80ac"
    assert stream.content == f"1 shards, 256 documents a window, {hashes}"


def test_data_that_nobody_has_looked_for_is_opened_once(tmp_path: Path, monkeypatch) -> None:
    """By the launcher: an open cache reads an index of all its parts."""
    (tmp_path / "a.txt").write_text("Some text. " * 99)
    words = ["debug_model", "--training.dataset=text", f"--training.dataset_path={tmp_path}/a.txt"]
    words += ["--training.seq_len=64", f"--training.token_cache_folder={tmp_path}/cache"]
    config = load_config([*words, "--validation.enable=false"])
    (made,) = open_data("training", config, num_workers=1)
    opened, begin = list[Path](), TokenCache.__init__

    def count(self: TokenCache, folder: Path, **options: Any) -> None:
        opened.append(folder)
        begin(self, folder, **options)

    monkeypatch.setattr(TokenCache, "__init__", count)
    (source,) = open_data("training", config)
    assert opened == [source.cache.folder]
    assert source.facts == made.facts
    (again,) = open_data("training", config, find_data(config))
    assert again.facts == source.facts
    assert again.content == source.content
